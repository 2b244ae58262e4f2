"""The loop of a learner rank::

    leader   lease ──> plan ──> order ─┬─> fetch ──> share ──> train ──> commit ──> publish ──> metrics ──> checkpoint ──> lease …
    others             (wait)   order ─┴─> fetch ──> share ──> train ─────────────> (drain)               ─> checkpoint ──> (wait)

Consumes leases (the leader) and payloads (the source rank of each replica, which shares them with its other ranks) of the queue; produces
commits, published versions, metrics and checkpoints. The leader is the first source. It waits for the queue, which the generators unblock;
the others wait for the leader, which sends an order at least once a second, and for their source, which the queue unblocks. A stop is
agreed by all ranks: between orders, or between micro-batches while no optimizer step has happened yet; then the lease goes back untrained.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from asyncrl.config import Config
from asyncrl.errors import EngineError, ProcessDied
from asyncrl.learner.control import Control
from asyncrl.learner.engine import StepAbandoned
from asyncrl.learner.metrics import StepClock, StepMetrics
from asyncrl.learner.plan import PlanSettings, StepPlan, plan_step, staleness_histogram
from asyncrl.learner.source import BatchSource
from asyncrl.learner.worker import StepResult, TrainingWorker
from asyncrl.queue.messages import Committed, Frontier, Lease
from asyncrl.trajectory import GroupMeta, TrajectoryGroup

__all__ = ["Ending", "Outlets", "Pool"]

log = logging.getLogger(__name__)


class Ending(enum.StrEnum):
    """Why the loop ended."""

    STEPS = "all steps are trained"
    TARGET = "the target reward is reached"
    PROMPTS = "the queue has no more batches"
    ASKED = "asked to stop"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader tells the others: wait on, train a plan over these groups, or end."""

    plan: StepPlan | None = None
    groups: tuple[GroupMeta, ...] = ()
    ending: Ending | None = None


class Outlets(Protocol):
    """Where a pool's results go; every method is called on every rank, in the same order."""

    def publish(self, version: int) -> None:
        """Brings the weights to the generators."""

    def metrics(self, values: dict[str, Any]) -> None:
        """Keeps a step's metrics (the leader alone has any)."""

    def checkpoint(self, step: int, frontier: Frontier | None, synced: bool = True) -> None:
        """Begins to save the weights with the frontier that belongs to them; ``synced``: whole is when the disk has it."""

    def finish_checkpoint(self, *, wait: bool) -> int | None:
        """Makes what was begun whole, once all ranks have written theirs.

        Returns the oldest step that can still be restored; None while it is not whole, or where nothing was begun.
        """

    def sync_s(self) -> float:
        """Seconds of the last completed sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leased:
    lease: Lease
    blocked: str
    wait_s: float


class Pool:
    """One rank of the learner.

    Args:
        config: of the run; worker: around an initialized engine; control: agreement with the other ranks; source: the queue, None
        on a rank that is not the source of its replica; outlets: where results go; step: training steps in the starting weights;
        run_start_s: unix time at which this start began; quadratic: cost of a token pair in units of a token, the same on every rank;
        on_version: told each new version (for the log).

    Raises:
        EngineError: the leader, which leases and reports, is not the source of its replica.
    """

    def __init__(
        self,
        config: Config,
        worker: TrainingWorker,
        control: Control,
        source: BatchSource | None,
        outlets: Outlets,
        *,
        step: int,
        run_start_s: float,
        quadratic: float,
        on_version: Callable[[int], None],
    ) -> None:
        if control.is_leader and not worker.engine.is_mp_source:
            raise EngineError(f"a source leases and reports; learner-{control.rank} leads with is_mp_source = False")
        self._config = config
        self._worker = worker
        self._control = control
        self._queue = source
        self._outlets = outlets
        self._metrics = StepMetrics(run_start_s, time.time(), resumed=step > 0)
        self._on_version = on_version
        self._mismatch_kl = 0.0
        self._staleness: dict[int, int] = {}
        self._frontier: Frontier | None = None
        self._saved = step
        self._stop = False
        self.step = step
        self._plan_settings = PlanSettings(
            replicas=worker.engine.data_parallel_size,
            mini_batches=config.algorithm.mini_batches,
            keep_no_signal=config.algorithm.no_signal == "keep",
            shared_prompt=config.learner.shared_prompt,
            quadratic=quadratic,
        )

    def stop(self) -> None:
        """Asks for an orderly end; safe in a signal handler."""
        self._stop = True

    def run(self) -> Ending:
        """Trains until the steps, the target or the prompts are done, or a stop is asked for; leaves a checkpoint of the last step."""
        self._outlets.publish(self.step)
        ending = Ending.STEPS if self.step >= self._config.launch.steps else None
        while ending is None:
            ending = self._turn()
        if self._saved != self.step:  # a stop has seconds, in which a disk of 100 MB/s does not sync a checkpoint
            self._checkpoint(synced=ending is not Ending.ASKED)
        self._finish_checkpoint(wait=True)
        log.info("ended at step %d: %s", self.step, ending.value)
        return ending

    def _turn(self) -> Ending | None:
        leased = self._lease() if self._control.is_leader else None
        order = self._next_order(leased)
        if order.plan is None:
            return order.ending
        groups = self._fetch(order)
        if groups is None:
            return None
        started_s = time.monotonic()
        try:
            result = self._worker.train_step(order.plan, groups, self._asked)
        except StepAbandoned:
            if self._control.is_leader:
                self._source.give_back(self.step)
            log.info("gave the batch of step %d back untrained", self.step)
            return Ending.ASKED
        return self._settle(order.plan, result, leased, time.monotonic() - started_s)

    def _fetch(self, order: Order) -> dict[int, TrajectoryGroup] | None:
        """Payload of this replica's groups; None when some replica cannot use its own, and the batch went back."""
        assert order.plan is not None
        tickets = set(order.plan.tickets_of(self._worker.engine.data_parallel_rank))
        mine = [meta for meta in order.groups if meta.ticket in tickets]
        groups, damaged = self._worker.replica.groups(lambda: self._source.fetch(mine))
        if damaged and self._worker.engine.is_mp_source:
            self._source.give_back(self.step, damaged)
        if not self._control.any(bool(damaged)):
            return groups
        if self._control.is_leader:
            self._source.give_back(self.step)
        return None

    @property
    def _source(self) -> BatchSource:
        assert self._queue is not None  # sources alone ask it, and the leader is one
        return self._queue

    def _lease(self) -> _Leased | None:
        started_s = time.monotonic()
        lease, blocked = self._source.lease(self.step, self._tick)
        if lease is None:
            return None
        return _Leased(lease=lease, blocked=blocked, wait_s=time.monotonic() - started_s)

    def _tick(self) -> bool:
        """The leader between two waits: agrees on a stop, else tells the others to wait on."""
        if self._asked():
            return True
        self._control.broadcast(_encode(Order()))
        return False

    def _asked(self) -> bool:
        return self._control.any(self._stop)

    def _next_order(self, leased: _Leased | None) -> Order:
        """The leader sends what follows from its lease; the others listen until something follows."""
        if self._control.is_leader:
            if leased is None:
                return Order(ending=Ending.ASKED)  # the vote has told the others already
            if self._asked():
                if leased.lease.groups:
                    self._source.give_back(self.step)
                return Order(ending=Ending.ASKED)
            order = self._order(leased.lease)
            self._control.broadcast(_encode(order))
            return order
        while True:
            if self._asked():
                return Order(ending=Ending.ASKED)
            order = _decode(self._control.broadcast(b""), f"learner-{self._control.leader}")
            if order.plan is not None or order.ending is not None:
                return order

    def _order(self, lease: Lease) -> Order:
        if not lease.groups:
            return Order(ending=Ending.PROMPTS)
        plan = plan_step(self.step, lease.groups, self._plan_settings, recompute=self._recompute(lease))
        trained = [meta for meta in lease.groups if meta.ticket in plan.sizes]
        self._staleness = staleness_histogram(self.step, trained, self._config.queue.max_staleness)
        return Order(plan=plan, groups=lease.groups)

    def _recompute(self, lease: Lease) -> bool:
        algorithm = self._config.algorithm
        if algorithm.proximal != "auto":
            return algorithm.proximal == "recompute"
        oldest = min(meta.oldest_version for meta in lease.groups)
        return self.step - oldest > algorithm.auto_staleness or self._mismatch_kl > algorithm.auto_drift

    def _settle(self, plan: StepPlan, result: StepResult | None, leased: _Leased | None, train_s: float) -> Ending | None:
        """Everything after the optimizer: commit, publish, metrics, checkpoint, and whether the run is over."""
        committed = self._source.commit(self.step) if self._control.is_leader else None
        self.step += 1
        self._on_version(self.step)
        if result is not None:
            self._mismatch_kl = result.statistics["mismatch_kl"]
            for reason in result.skipped:
                log.warning("an optimizer step of training step %d was skipped: %s", self.step, reason)
        reached = self._report(plan, result, leased, committed, train_s)
        last = self._control.any(reached) or self.step >= self._config.launch.steps
        if not last and self.step % self._config.sync.every == 0 and not self._asked():  # nobody samples after a stop
            self._outlets.publish(self.step)
        self._finish_checkpoint(wait=False)
        every = self._config.launch.checkpoint_every
        if every and self.step % every == 0:
            self._checkpoint()
        if not last:
            return None
        return Ending.STEPS if self.step >= self._config.launch.steps else Ending.TARGET

    def _checkpoint(self, synced: bool = True) -> None:
        self._finish_checkpoint(wait=True)
        self._outlets.checkpoint(self.step, self._frontier, synced)
        self._saved = self.step

    def _finish_checkpoint(self, *, wait: bool) -> None:
        oldest = self._outlets.finish_checkpoint(wait=wait)
        if oldest is not None and self._control.is_leader:
            self._source.checkpointed(oldest)

    def _report(
        self, plan: StepPlan, result: StepResult | None, leased: _Leased | None, committed: Committed | None, train_s: float
    ) -> bool:
        """Writes metrics on the leader; whether the target reward is reached."""
        packed = self._control.total(result.packed_tokens if result is not None else 0)  # sources alone: each replica once
        if leased is None or committed is None or result is None:
            return False
        self._frontier = committed.frontier
        clock = StepClock(wait_s=leased.wait_s, train_s=train_s, now_s=time.time(), blocked=leased.blocked or committed.status.blocked)
        result = replace(result, packed_tokens=packed)
        values = self._metrics.build(leased.lease.groups, plan, self._staleness, result, committed.status, clock, self._outlets.sync_s())
        self._outlets.metrics(values)
        target, mean = self._config.launch.target_reward, self._metrics.reward_window_mean
        return bool(target) and mean is not None and mean >= target


def _encode(order: Order) -> bytes:
    return msgspec.msgpack.encode(order)


def _decode(message: bytes, sender: str) -> Order:
    try:
        return msgspec.msgpack.decode(message, type=Order)
    except msgspec.DecodeError as error:
        raise ProcessDied(f"{sender} sends orders; met {len(message)} bytes that are none: {error}", process=sender) from error
