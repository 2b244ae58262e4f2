"""How the model is called: a worker turns a step's plan and this replica's groups into engine calls.

Results come back on the source of a replica alone.
Batch ⊃ mini-batch ⊃ micro-batch: a step trains one batch; each mini-batch is one optimizer step; micro-batches are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from asyncrl.algorithms import group_advantages
from asyncrl.algorithms.divergence import effective_sample_size
from asyncrl.algorithms.losses import STATISTICS, Denominators
from asyncrl.config import AlgorithmConfig
from asyncrl.learner.batch import Batch, Row, TrainOutput
from asyncrl.learner.engine import Engine
from asyncrl.learner.objective import PolicyObjective, Proximal, loss_settings
from asyncrl.learner.plan import StepPlan, check_payload
from asyncrl.learner.roles import ACTOR, GLOO_TIMEOUT_S, ModelWorker
from asyncrl.trajectory import TrajectoryGroup

__all__ = ["StepResult", "TrainingWorker", "statistics_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did on this replica (``packed_tokens``) and over all of them (the rest).

    ``updates`` optimizer steps happened; ``skipped`` holds the reason of each that did not.
    """

    statistics: dict[str, float]
    updates: int
    skipped: tuple[str, ...]
    packed_tokens: int


class TrainingWorker(ModelWorker):
    """The actor, through the updates of a whole training step.

    Args:
        engine: an initialized engine; algorithm: the options that shape advantages and loss;
        timeout_s: how long ranks of a replica wait for its source.
    """

    def __init__(self, engine: Engine, algorithm: AlgorithmConfig, timeout_s: float = GLOO_TIMEOUT_S) -> None:
        super().__init__(engine, ACTOR, timeout_s)
        self.algorithm = algorithm
        self.settings = loss_settings(algorithm)

    def rows_of(self, groups: Sequence[TrajectoryGroup]) -> tuple[Row, ...]:
        """Rows with advantages, in the order of the groups; each group's moments come from all its siblings."""
        trajectories = [t for group in groups for t in group.trajectories]
        advantages = group_advantages(
            [t.group_id for t in trajectories],
            [t.sibling for t in trajectories],
            [t.reward for t in trajectories],
            self.algorithm.advantage,
        )
        return tuple(Row(trajectory=t, advantage=float(a)) for t, a in zip(trajectories, advantages.values_N, strict=True))

    def train_step(self, plan: StepPlan, groups: Mapping[int, TrajectoryGroup], should_stop: Callable[[], bool]) -> StepResult | None:
        """Runs every update of the plan; the result on the source of a replica, None on its other ranks.

        Raises:
            StepAbandoned: ``should_stop`` said so, on all ranks, before the first optimizer step.
            DataError: a payload differs from its metadata.
        """
        for group in groups.values():
            check_payload(plan, group)
        rows = {ticket: self.rows_of([group]) for ticket, group in groups.items()}
        proximal = self._proximal(plan)
        if proximal == "given":
            rows = self._with_proximal(rows, should_stop)
        objective = PolicyObjective(self.settings, proximal)
        outputs: list[TrainOutput] = []
        for _ in range(self.algorithm.epochs):
            for mini in plan.mini_batches:
                mine = mini.tickets_by_replica[self.engine.data_parallel_rank]
                batch = Batch(
                    rows_N=tuple(row for ticket in mine for row in rows[ticket]),
                    denominators=Denominators(tokens=mini.tokens, trajectories=mini.trajectories),
                    quadratic=plan.quadratic,
                )
                outputs.append(self.train_mini_batch(batch, objective, should_stop if not _stepped(outputs) else _never))
        if not self.replica.is_source:
            return None
        return StepResult(
            statistics=statistics_of(outputs),
            updates=sum(output.stepped for output in outputs),
            skipped=tuple(output.skipped for output in outputs if output.skipped),
            packed_tokens=sum(output.packed_tokens for output in outputs),
        )

    def _proximal(self, plan: StepPlan) -> Proximal:
        if not plan.recompute:
            return "behavior"
        # with a single update the weights at the start of the batch are the current ones: no pass of its own
        return "current" if len(plan.mini_batches) * self.algorithm.epochs == 1 else "given"

    def _with_proximal(self, rows: dict[int, tuple[Row, ...]], should_stop: Callable[[], bool]) -> dict[int, tuple[Row, ...]]:
        flat = tuple(row for chosen in rows.values() for row in chosen)
        lengths = [len(row.trajectory) for row in flat]
        scored = iter(self.replica.logprobs(self.infer_batch(flat, should_stop).predictions_N, lengths))
        return {ticket: tuple(replace(row, proximal_logprobs=next(scored)) for row in chosen) for ticket, chosen in rows.items()}


def statistics_of(outputs: Sequence[TrainOutput]) -> dict[str, float]:
    """Means over the step's tokens; ``mismatch_kl`` and ``ess`` of the first update, the only one at the weights of the batch's start.

    ``drift`` is the mean |log ratio| of the last update.
    """
    first, last = (dict(zip(STATISTICS, output.sums.tolist(), strict=True)) for output in (outputs[0], outputs[-1]))
    total = dict(zip(STATISTICS, torch.stack([output.sums for output in outputs]).sum(0).tolist(), strict=True))
    tokens = max(total["tokens"], 1.0)
    return {
        "loss": total["loss"] / len(outputs),
        "grad_norm": sum(output.grad_norm for output in outputs) / len(outputs),
        "router_loss": sum(output.router_loss for output in outputs) / len(outputs),
        "entropy": total["entropy"] / tokens,
        "clip_fraction": total["clipped"] / max(total["kept_tokens"], 1.0),
        "abs_log_ratio": total["abs_log_ratio"] / tokens,
        "drift": last["abs_log_ratio"] / max(last["tokens"], 1.0),
        "mismatch_kl": first["k3"] / max(first["tokens"], 1.0),
        "ess": effective_sample_size(first["weight"], first["weight_square"], first["tokens"]),
        "correction_mean": total["correction"] / tokens,
        "correction_beyond_cap": total["beyond_cap"] / tokens,
        "masked_tokens": total["tokens"] - total["kept_tokens"],
    }


def _stepped(outputs: Sequence[TrainOutput]) -> bool:
    return any(output.stepped for output in outputs)


def _never() -> bool:
    return False
