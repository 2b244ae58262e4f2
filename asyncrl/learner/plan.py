"""The plan of one training step, made from metadata alone: who trains which group in which update, and what divides the loss.

A batch is split into mini-batches in training order; one mini-batch is one optimizer step. Inside a mini-batch whole groups go to
data-parallel replicas, so that the one with the most work has as little as can be had (:mod:`asyncrl.learner.balance`).
Denominators are counted here, once, over all replicas, from exactly the rows that are trained. Rank 0 makes the plan and sends it to
the others as msgpack.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from asyncrl.errors import DataError, VersionError
from asyncrl.learner.balance import partition
from asyncrl.learner.cost import work_of
from asyncrl.trajectory import GroupMeta, TrajectoryGroup

__all__ = ["MiniBatchPlan", "PlanSettings", "StepPlan", "check_payload", "cost_of", "plan_step", "staleness_histogram"]


class MiniBatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Tickets for each replica, and the denominators over all of them."""

    tickets_by_replica: tuple[tuple[int, ...], ...]
    tokens: int
    trajectories: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One training step.

    ``step`` is the learner's step at its start; ``skipped`` are leased groups without signal; ``recompute`` asks for proximal
    log-probs of the weights at the start; ``sizes`` tells what each payload must hold: (trajectories, sampled tokens) by ticket;
    ``quadratic`` as in :class:`PlanSettings`, None where one replica has no other to keep step with.
    """

    step: int
    mini_batches: tuple[MiniBatchPlan, ...]
    skipped: tuple[int, ...]
    recompute: bool
    sizes: dict[int, tuple[int, int]]
    quadratic: float | None

    def tickets_of(self, replica: int) -> tuple[int, ...]:
        """What a replica trains in this step, in training order."""
        return tuple(sorted(ticket for mini in self.mini_batches for ticket in mini.tickets_by_replica[replica]))

    @property
    def tokens(self) -> int:
        """Sampled tokens of one pass over the batch."""
        return sum(mini.tokens for mini in self.mini_batches)


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``quadratic`` is the cost of a token pair in units of a token, see :mod:`asyncrl.learner.cost`."""

    replicas: int
    mini_batches: int
    keep_no_signal: bool
    shared_prompt: bool
    quadratic: float


def plan_step(step: int, groups: Sequence[GroupMeta], settings: PlanSettings, *, recompute: bool) -> StepPlan:
    """Plans a leased batch; the same groups always give the same plan.

    Groups whose rewards do not differ are skipped unless ``keep_no_signal``. There are at most ``mini_batches`` mini-batches of
    sizes that differ by one, none of them empty; a batch without a trainable group gives a single empty one.

    Example:
        Three groups of costs 5, 3, 3 on two replicas: the first on replica 0, the others on replica 1.
    """
    ordered = sorted(groups, key=lambda meta: meta.ticket)
    trained = [meta for meta in ordered if settings.keep_no_signal or meta.has_signal]
    count = max(1, min(settings.mini_batches, len(trained)))
    bounds = [len(trained) * k // count for k in range(count + 1)]
    minis = tuple(_mini_batch(trained[low:high], settings) for low, high in itertools.pairwise(bounds))
    kept = {meta.ticket for meta in trained}
    return StepPlan(
        step=step,
        mini_batches=minis,
        skipped=tuple(meta.ticket for meta in ordered if meta.ticket not in kept),
        recompute=recompute,
        sizes={meta.ticket: (len(meta.lengths_N), meta.num_sampled_tokens) for meta in trained},
        quadratic=settings.quadratic if settings.replicas > 1 else None,
    )


def cost_of(meta: GroupMeta, settings: PlanSettings) -> float:
    """Work of one group in units of a token: linear in the tokens computed, quadratic in what attends to what."""
    prompts = meta.prompt_lengths_N
    if settings.shared_prompt and len(set(prompts)) == 1:
        tokens, pairs = work_of([length - prompts[0] for length in meta.lengths_N], prompts[0])
    else:
        tokens, pairs = work_of(meta.lengths_N, 0)
    return tokens + settings.quadratic * pairs


def staleness_histogram(step: int, groups: Sequence[GroupMeta], max_staleness: int) -> dict[int, int]:
    """Sampled tokens by ``step`` minus the version that sampled them.

    Raises:
        VersionError: a token from the future, or older than ``max_staleness``.
    """
    histogram: dict[int, int] = {}
    for meta in groups:
        for version, tokens in meta.tokens_by_version.items():
            lag = step - version
            if not 0 <= lag <= max_staleness:
                raise VersionError(
                    f"staleness lies in 0..queue.max_staleness = {max_staleness}; met {lag}: tokens of version {version} in the batch of "
                    f"step {step}",
                    group_id=meta.group_id,
                    policy_version=version,
                )
            histogram[lag] = histogram.get(lag, 0) + tokens
    return dict(sorted(histogram.items()))


def check_payload(plan: StepPlan, group: TrajectoryGroup) -> None:
    """Raises DataError where a payload does not hold what the plan counted: the denominator would be wrong."""
    met = (len(group.trajectories), sum(t.num_sampled_tokens for t in group.trajectories))
    planned = plan.sizes[group.ticket]
    if met != planned:
        raise DataError(
            f"ticket {group.ticket} was planned with (trajectories, sampled tokens) = {planned}; its payload holds {met}",
            group_id=group.group_id,
        )


def _mini_batch(groups: Sequence[GroupMeta], settings: PlanSettings) -> MiniBatchPlan:
    return MiniBatchPlan(
        tickets_by_replica=partition({meta.ticket: cost_of(meta, settings) for meta in groups}, settings.replicas),
        tokens=sum(meta.num_sampled_tokens for meta in groups),
        trajectories=sum(len(meta.lengths_N) for meta in groups),
    )
