"""One dictionary of numbers for each training step, from the lease, the result, the queue's status and the clock passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.learner.plan import StepPlan
from asyncrl.learner.worker import StepResult
from asyncrl.queue.messages import QueueStatus
from asyncrl.trajectory import GroupMeta

__all__ = ["StepClock", "StepMetrics"]

REWARD_WINDOW_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClock:
    """Seconds of one step: waited for the lease, trained, and unix time at its end; ``blocked`` is what the lease waited for."""

    wait_s: float
    train_s: float
    now_s: float
    blocked: str


class StepMetrics:
    """Builds the metrics of successive steps; keeps what differences and the reward window need.

    Args:
        run_start_s: unix time at which this start of the run began; now_s: unix time now.
        resumed: the queue counts from the first start of the run, so that the first step has nothing to take differences from.
    """

    def __init__(self, run_start_s: float, now_s: float, *, resumed: bool) -> None:
        self._run_start_s = run_start_s
        self._last_s = now_s
        self._counted: tuple[int, float, int] | None = None if resumed else (0, 0.0, 0)
        self._window: deque[float] = deque(maxlen=REWARD_WINDOW_STEPS)

    def build(
        self,
        groups: Sequence[GroupMeta],
        plan: StepPlan,
        staleness: dict[int, int],
        result: StepResult,
        status: QueueStatus,
        clock: StepClock,
        sync_s: float,
    ) -> dict[str, Any]:
        """Metrics of the step that was just committed; ``step`` counts it in."""
        trained = [meta for meta in groups if meta.ticket in plan.sizes]
        rewards = [reward for meta in trained for reward in meta.rewards_N]
        sampled_s, self._last_s = max(clock.now_s - self._last_s, 1e-9), clock.now_s
        before, self._counted = self._counted, (status.generator_tokens, status.rewards_sum, status.rewards_count)
        since = tuple(now - then for now, then in zip(self._counted, before, strict=True)) if before else None
        return {
            "step": plan.step + 1,
            "policy_version": plan.step + 1,
            "reward_mean": self._reward_mean(since[1:] if since else (0.0, 0), rewards),
            "trained_reward_mean": sum(rewards) / len(rewards) if rewards else None,
            **_lags(staleness, status),
            "trained_groups": len(trained),
            "skipped_groups": len(plan.skipped),
            "trained_tokens": plan.tokens,
            "packed_tokens": result.packed_tokens,
            "generator_tokens_per_s": since[0] / sampled_s if since else None,
            "learner_tokens_per_s": plan.tokens / max(clock.train_s, 1e-9),
            "queue_groups": status.queued_groups,
            "sync_s": sync_s,
            **result.statistics,
            "updates": result.updates,
            "recomputed": plan.recompute,
            "wait_s": clock.wait_s,
            "train_s": clock.train_s,
            "wall_s": clock.now_s - self._run_start_s,
            "blocked": clock.blocked,
        }

    @property
    def reward_window_mean(self) -> float | None:
        """Mean reward of the last ten steps; None before there are ten."""
        if len(self._window) < REWARD_WINDOW_STEPS:
            return None
        return sum(self._window) / REWARD_WINDOW_STEPS

    def _reward_mean(self, finished: Sequence[float], trained: list[float]) -> float | None:
        """Over all groups finished since the step before (sum, count), with signal or not; over the trained ones where none finished."""
        if finished[1] > 0:
            mean = finished[0] / finished[1]
        elif trained:
            mean = sum(trained) / len(trained)
        else:
            return None
        self._window.append(mean)
        return mean


def _lags(staleness: dict[int, int], status: QueueStatus) -> dict[str, Any]:
    """The lag histograms in tokens, and mean and maximum of the trained one."""
    num_tokens = sum(staleness.values())
    return {
        "staleness_mean": sum(lag * tokens for lag, tokens in staleness.items()) / num_tokens if num_tokens else 0.0,
        "staleness_max": max(staleness, default=0),
        "staleness_hist": staleness,
        "lag_in_flight": dict(status.lag.in_flight),
        "lag_queued": dict(status.lag.queued),
    }
