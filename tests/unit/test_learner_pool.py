from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from learner_support import random_groups

from asyncrl.algorithms.losses import STATISTICS
from asyncrl.config import Config
from asyncrl.errors import EngineError, VersionError
from asyncrl.learner.batch import TrainOutput
from asyncrl.learner.control import Control
from asyncrl.learner.engine import StepAbandoned
from asyncrl.learner.plan import StepPlan
from asyncrl.learner.pool import Ending, Pool
from asyncrl.learner.replica import Replica
from asyncrl.learner.worker import StepResult, statistics_of
from asyncrl.queue.messages import Committed, Frontier, LagHistogram, Lease, QueueStatus
from asyncrl.trajectory import GroupMeta, TrajectoryGroup

NO_LAG = LagHistogram(consumed={}, in_flight={1: 5}, queued={0: 7})


def status(step: int, rewards_sum: float, rewards_count: int) -> QueueStatus:
    return QueueStatus(
        step=step,
        admitted=0,
        trained=0,
        dropped={},
        in_flight=0,
        generating=0,
        queued_groups=3,
        queued_bytes=0,
        oldest_queued_s=0.0,
        leased=0,
        reissued=0,
        lag=NO_LAG,
        generator_tokens=100 * step,
        rewards_sum=rewards_sum,
        rewards_count=rewards_count,
        refused={},
        blocked="",
        producers={},
        stopping=False,
    )


class FakeSource:
    """Two groups a step, all sampled by version 0 unless told; writes down what is asked of it."""

    def __init__(self, events: list[str], batches: int = 100, rewards: float = 0.5) -> None:
        self.events, self.batches, self.rewards = events, batches, rewards
        self.damaged: list[tuple[int, int, str]] = []
        self.version: Callable[[int], int] = lambda step: step

    def lease(self, step: int, tick: Callable[[], bool]) -> tuple[Lease | None, str]:
        if tick():
            return None, "stopped"
        self.events.append(f"lease {step}")
        if step >= self.batches:
            return Lease(step=step, groups=(), blocked="the prompts are used up", ended=True), ""
        self.groups = {g.ticket: g for g in random_groups(2, 2, seed=step, version=self.version(step))}
        return Lease(step=step, groups=tuple(g.meta() for g in self.groups.values())), "a ticket"

    def fetch(self, groups: Sequence[GroupMeta]) -> tuple[dict[int, TrajectoryGroup], list[tuple[int, int, str]]]:
        tickets = [meta.ticket for meta in groups]
        self.events.append(f"fetch {tickets}")
        damaged, self.damaged = self.damaged, []
        return {ticket: self.groups[ticket] for ticket in tickets}, damaged

    def checkpointed(self, oldest_step: int) -> None:
        self.events.append(f"keep from {oldest_step}")

    def commit(self, step: int) -> Committed:
        self.events.append(f"commit {step}")
        frontier = Frontier(steps=step + 1, low=2 * step + 2, settled_above=(), trained=0, dropped={})
        return Committed(frontier=frontier, status=status(step + 1, self.rewards * 4 * (step + 1), 4 * (step + 1)))

    def give_back(self, step: int, damaged: Sequence[tuple[int, int, str]] = ()) -> None:
        self.events.append(f"return {step} {[ticket for ticket, *_ in damaged]}" if damaged else f"return {step}")


class FakeEngine:
    data_parallel_size = 1
    data_parallel_rank = 0
    is_mp_source = True
    model_parallel_group = None


class FakeWorker:
    """Trains nothing; may call for a stop in the middle."""

    engine = FakeEngine()
    replica = Replica(engine, 1.0)

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.during: Callable[[], None] = lambda: None
        self.plans: list[StepPlan] = []

    def train_step(self, plan: StepPlan, groups: Mapping[int, TrajectoryGroup], should_stop: Callable[[], bool]) -> StepResult:
        self.plans.append(plan)
        self.during()
        if should_stop():
            raise StepAbandoned
        self.events.append(f"train {plan.step}")
        sums = torch.zeros(len(STATISTICS), dtype=torch.float64)
        sums[STATISTICS.index("tokens")], sums[STATISTICS.index("k3")] = 10.0, 0.8
        statistics = statistics_of([TrainOutput(sums=sums, packed_tokens=12, grad_norm=2.0, stepped=True)])
        return StepResult(statistics=statistics, updates=1, skipped=(), packed_tokens=12)


class FakeOutlets:
    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.lines: list[dict[str, Any]] = []
        self.writing: int | None = None
        self.fast_disk = True

    def publish(self, version: int) -> None:
        self.events.append(f"publish {version}")

    def metrics(self, values: dict[str, Any]) -> None:
        self.lines.append(values)
        self.events.append("metrics")

    def checkpoint(self, step: int, frontier: Frontier | None, synced: bool = True) -> None:
        hurried = "" if synced else " in a hurry"
        self.events.append(f"checkpoint {step} low {frontier.low if frontier else None}{hurried}")
        self.writing = step

    def finish_checkpoint(self, *, wait: bool) -> int | None:
        if self.writing is None or not (wait or self.fast_disk):
            return None
        written, self.writing = self.writing, None
        return written

    def sync_s(self) -> float:
        return 0.25


class World:
    """A pool of one rank among fakes."""

    def __init__(self, options: dict[str, Any], step: int = 0, engine: FakeEngine = FakeWorker.engine, **source: Any) -> None:
        self.events: list[str] = []
        self.source, self.worker, self.outlets = FakeSource(self.events, **source), FakeWorker(self.events), FakeOutlets(self.events)
        self.worker.engine = engine
        self.pool = Pool(
            Config.model_validate(options),
            self.worker,
            Control(0, 1, 1.0),
            self.source,
            self.outlets,
            step=step,
            run_start_s=0.0,
            quadratic=0.0,
            on_version=lambda version: None,
        )


def test_a_step_leases_fetches_trains_commits_reports_and_publishes_in_that_order():
    world = World({"launch": {"steps": 2, "checkpoint_every": 0}})
    assert world.pool.run() is Ending.STEPS
    assert world.events == [
        *("publish 0", "lease 0", "fetch [0, 1]", "train 0", "commit 0", "metrics", "publish 1"),
        *("lease 1", "fetch [0, 1]", "train 1", "commit 1", "metrics", "checkpoint 2 low 4", "keep from 2"),
    ]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_queue_hears_of_it_when_it_is_whole():
    world = World({"launch": {"steps": 3, "checkpoint_every": 1}})
    world.outlets.fast_disk = False
    world.pool.run()
    assert [e for e in world.events if e.startswith(("train", "checkpoint", "keep"))] == [
        *("train 0", "checkpoint 1 low 2", "train 1", "keep from 1", "checkpoint 2 low 4"),
        *("train 2", "keep from 2", "checkpoint 3 low 6", "keep from 3"),
    ]


def test_publishes_and_checkpoints_keep_their_intervals_and_the_last_step_is_saved_once():
    world = World({"launch": {"steps": 6, "checkpoint_every": 3}, "sync": {"every": 2}})
    world.pool.run()
    assert [e for e in world.events if e.startswith(("publish", "checkpoint"))] == [
        *("publish 0", "publish 2", "checkpoint 3 low 6", "publish 4", "checkpoint 6 low 12")
    ]


def test_damaged_payload_sends_the_batch_back_and_the_step_is_leased_anew():
    world = World({"launch": {"steps": 1, "checkpoint_every": 0}})
    world.source.damaged = [(1, 0, "checksum")]
    assert world.pool.run() is Ending.STEPS
    assert world.events[1:6] == ["lease 0", "fetch [0, 1]", "return 0 [1]", "return 0", "lease 0"]
    assert world.events.count("train 0") == world.events.count("commit 0") == 1


def test_a_resumed_pool_publishes_its_starting_step_and_counts_on():
    world = World({"launch": {"steps": 4, "checkpoint_every": 0}}, step=3)
    world.pool.run()
    assert world.events[:2] == ["publish 3", "lease 3"]
    assert world.outlets.lines[0]["step"] == world.outlets.lines[0]["policy_version"] == 4


def test_a_pool_that_has_all_its_steps_saves_nothing_anew():
    world = World({"launch": {"steps": 3}}, step=3)
    assert world.pool.run() is Ending.STEPS
    assert world.events == ["publish 3"]


def test_a_stop_in_mid_step_gives_the_lease_back_and_saves_the_last_whole_step():
    world = World({"launch": {"checkpoint_every": 0}})
    world.worker.during = lambda: world.pool.stop() if len(world.worker.plans) == 2 else None
    assert world.pool.run() is Ending.ASKED
    assert world.events[-5:] == ["lease 1", "fetch [0, 1]", "return 1", "checkpoint 1 low 2 in a hurry", "keep from 1"]


def test_a_stop_before_the_first_step_ends_without_a_checkpoint():
    world = World({})
    world.pool.stop()
    assert world.pool.run() is Ending.ASKED
    assert world.events == ["publish 0"]


def test_b53_the_end_of_the_prompts_ends_the_pool_with_a_checkpoint():
    world = World({"launch": {"checkpoint_every": 0}}, batches=1)
    assert world.pool.run() is Ending.PROMPTS
    assert world.events[-3:] == ["lease 1", "checkpoint 1 low 2", "keep from 1"]


def test_the_target_ends_the_pool_after_a_ten_step_mean():
    world = World({"launch": {"target_reward": 0.5, "checkpoint_every": 0}}, rewards=0.5)
    assert world.pool.run() is Ending.TARGET
    assert world.pool.step == 10


def test_metrics_take_differences_of_the_queues_counters():
    world = World({"launch": {"steps": 2}}, rewards=0.75)
    world.pool.run()
    line = world.outlets.lines[1]
    assert line["reward_mean"] == 0.75
    assert line["trained_reward_mean"] == 0.5  # two siblings a group, rewards 0 and 1
    assert line["lag_in_flight"] == {1: 5} and line["lag_queued"] == {0: 7}
    assert line["mismatch_kl"] == 0.08 and line["grad_norm"] == 2.0
    assert line["staleness_hist"] == {0: line["trained_tokens"]}
    assert (line["queue_groups"], line["sync_s"], line["blocked"], line["packed_tokens"]) == (3, 0.25, "a ticket", 12)


def test_the_first_step_after_a_resume_does_not_count_what_came_before():
    world = World({"launch": {"steps": 5, "checkpoint_every": 0}}, step=3, rewards=0.75)
    world.pool.run()
    first, second = world.outlets.lines
    assert (first["reward_mean"], first["generator_tokens_per_s"]) == (0.5, None)  # the mean of its own groups
    assert second["reward_mean"] == 0.75 and second["generator_tokens_per_s"] > 0


def test_b31_a_batch_from_the_future_is_refused_before_it_is_trained():
    world = World({})
    world.source.version = lambda step: 1
    with pytest.raises(VersionError, match="met -1"):
        world.pool.run()
    assert "train 0" not in world.events


def test_the_leader_must_be_the_source_of_its_replica():
    engine = FakeEngine()
    engine.is_mp_source = False
    with pytest.raises(EngineError, match="a source leases and reports; learner-0 leads"):
        World({}, engine=engine)


@pytest.mark.parametrize(
    ("options", "lag", "expected"),
    [
        ({"proximal": "bypass"}, 2, [False] * 3),
        ({"proximal": "recompute"}, 0, [True] * 3),
        ({"proximal": "auto", "auto_staleness": 1, "auto_drift": 1.0}, 2, [False, False, True]),  # lags 0, 1, 2
        ({"proximal": "auto", "auto_staleness": 9, "auto_drift": 0.05}, 0, [False, True, True]),  # drift 0.08 after the first step
    ],
)
def test_recompute_follows_the_option_the_staleness_or_the_drift(options: dict[str, Any], lag: int, expected: list[bool]):
    world = World({"algorithm": options, "launch": {"steps": 3}})
    world.source.version = lambda step: max(0, step - lag)
    world.pool.run()
    assert [plan.recompute for plan in world.worker.plans] == expected
