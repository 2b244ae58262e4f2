"""Four ranks in two replicas of two: two prompts with three responses each, two epochs of one mini-batch, micro-batches of one trajectory.

The source of a replica is its first rank once, and once, as in a pipeline, its last, so that rank 1 leads.
Who fetches, who trains which trajectory, what returns, how many optimizer updates; and that nothing is counted twice or awaited in vain.
Everything runs in one set of processes, whose notes the tests read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from learner_support import one_rank, run_ranks, spec, tiny_model_dir, trajectory

from asyncrl.algorithms.losses import Denominators
from asyncrl.config import Config
from asyncrl.errors import EngineError, PeerTimeout, ProcessDied
from asyncrl.learner import cost_probe
from asyncrl.learner.batch import Batch, BatchOutput, LossFunction, Row
from asyncrl.learner.control import Control
from asyncrl.learner.engine import Engine
from asyncrl.learner.fsdp2 import FSDP2Engine
from asyncrl.learner.plan import PlanSettings, StepPlan, plan_step
from asyncrl.learner.pool import Pool
from asyncrl.learner.replica import Fetched, Replica
from asyncrl.learner.worker import StepResult, TrainingWorker
from asyncrl.queue.messages import Committed, Frontier, LagHistogram, Lease, QueueStatus
from asyncrl.trajectory import GroupMeta, TrajectoryGroup

pytestmark = pytest.mark.real

OPTIONS: dict[str, Any] = {
    "algorithm": {"epochs": 2, "mini_batches": 1, "proximal": "recompute"},
    "learner": {"ranks": 4, "micro_batch_tokens": 10, "shared_prompt": False},
    "launch": {"steps": 1, "checkpoint_every": 0},
}
COMMITTED = Committed(
    frontier=Frontier(steps=1, low=2, settled_above=(), trained=0, dropped={}),
    status=QueueStatus(
        **dict.fromkeys(("step", "admitted", "trained", "in_flight", "generating", "queued_groups", "queued_bytes"), 0),
        **dict.fromkeys(("leased", "reissued", "generator_tokens", "rewards_count"), 0),
        **dict.fromkeys(("oldest_queued_s", "rewards_sum"), 0.0),
        dropped={},
        refused={},
        producers={},
        lag=LagHistogram(consumed={}, in_flight={}, queued={}),
        blocked="",
        stopping=False,
    ),
)
Notes = dict[str, Any]


def prompts() -> dict[int, TrajectoryGroup]:
    """Trajectories 0..2 are ticket 0, 3..5 are ticket 1: prompts of 4 tokens, responses of 6."""
    rng = np.random.default_rng(3)
    groups = {}
    for ticket in range(2):
        prompt = rng.integers(1, 64, 4).tolist()
        siblings = (
            trajectory(prompt, rng.integers(1, 64, 6).tolist(), group=f"g{ticket}", sibling=s, reward=[0.0, 1.0, 0.25][s]) for s in range(3)
        )
        groups[ticket] = TrajectoryGroup(trajectories=tuple(siblings))
    return groups


def content(group: TrajectoryGroup) -> list[Any]:
    return [[t.ticket, t.sibling, t.reward, t.input_ids.tolist(), t.behavior_logprobs.tolist()] for t in group.trajectories]


class Observed(FSDP2Engine):
    """Notes micro-batches and optimizer steps."""

    micro_batches: list[int]
    steps: int
    source: int  # place of the source in its replica

    @property
    def is_mp_source(self) -> bool:
        return dist.get_rank() % 2 == self.source

    def forward_backward_batch(self, batch: Batch, loss: LossFunction | None, **options: Any) -> BatchOutput:
        return super().forward_backward_batch(batch, loss and Listening(loss, self.micro_batches), **options)

    def optimizer_step(self) -> tuple[float, bool]:
        self.steps += 1
        return super().optimizer_step()


class Listening:
    def __init__(self, loss: LossFunction, lengths: list[int]) -> None:
        self.loss, self.lengths, self.entropy_gradient = loss, lengths, loss.entropy_gradient

    def __call__(self, logprobs: Any, entropy: Any, micro: Any, denominators: Denominators) -> Any:
        self.lengths.append(len(micro))
        return self.loss(logprobs, entropy, micro, denominators)


class ObservedWorker(TrainingWorker):
    """Notes what comes back, and the rows that are trained."""

    def __init__(self, engine: Engine, notes: Notes) -> None:
        super().__init__(engine, Config.model_validate(OPTIONS).algorithm, 120.0)
        self.notes = notes

    def train_step(self, plan: StepPlan, groups: Mapping[int, TrajectoryGroup], should_stop: Callable[[], bool]) -> StepResult | None:
        self.notes["trained"] = [content(groups[ticket]) for ticket in sorted(groups)]
        result = super().train_step(plan, groups, should_stop)
        self.notes["result"] = None if result is None else [result.updates, result.packed_tokens]
        return result

    def infer_batch(self, rows: tuple[Row, ...], should_stop: Callable[[], bool]) -> BatchOutput:
        output = super().infer_batch(rows, should_stop)
        self.notes["scored"] = len(output.predictions_N)
        return output


class OneDamage:
    """The queue of one rank: in the second replica the first payload is damaged."""

    def __init__(self, rank: int, notes: Notes) -> None:
        self.damaged = [(1, 0, "checksum")] if rank in (2, 3) else []
        self.notes = notes
        notes |= {"fetched": [], "returned": []}

    def lease(self, step: int, tick: Callable[[], bool]) -> tuple[Lease | None, str]:
        assert not tick()
        return Lease(step=step, groups=tuple(group.meta() for group in prompts().values())), ""

    def fetch(self, groups: Sequence[GroupMeta]) -> Fetched:
        self.notes["fetched"].append([meta.ticket for meta in groups])
        damaged, self.damaged = self.damaged, []
        return ({}, damaged) if damaged else ({meta.ticket: prompts()[meta.ticket] for meta in groups}, [])

    def commit(self, step: int) -> Committed:
        return COMMITTED

    def give_back(self, step: int, damaged: Sequence[tuple[int, int, str]] = ()) -> None:
        self.notes["returned"].append([ticket for ticket, *_ in damaged])

    def checkpointed(self, oldest_step: int) -> None:
        """Not noted."""


class Metrics:
    """Outlets that keep metrics alone."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def publish(self, version: int) -> None: ...

    def metrics(self, values: dict[str, Any]) -> None:
        self.lines.append(values)

    def checkpoint(self, step: int, frontier: Frontier | None, synced: bool = True) -> None: ...

    def finish_checkpoint(self, *, wait: bool) -> int | None: ...

    def sync_s(self) -> float:
        return 0.0


def _rank(rank: int, world: int, model_dir: str, out: str) -> None:
    control = Control(rank, world, 120.0)
    none = raised(lambda: control.elect(False), EngineError)
    last, _ = _run(rank, 1, control, model_dir)
    first, worker = _run(rank, 0, control, model_dir)
    control.barrier()
    if rank == 3:  # its source has ended
        first["gone"] = raised(lambda: worker.replica.groups(timeout), ProcessDied)
    Path(f"{out}.{rank}").write_text(json.dumps([first | {"no source": none}, last]))


def _run(rank: int, source: int, control: Control, model_dir: str) -> tuple[Notes, ObservedWorker]:
    notes: Notes = {}
    engine = Observed(spec(model_dir, tensor_parallel=2, micro_batch_tokens=10, shared_prompt=False, warmup_steps=0))
    engine.initialize()
    engine.micro_batches, engine.steps, engine.source = [], 0, source
    control.elect(engine.is_mp_source)
    cost_probe.MAX_PASS_S, cost_probe.fitted_ratio = 60.0, lambda timings: len(timings) + 0.1 * rank  # as if each clock ran otherwise
    notes["pair_cost"] = cost_probe.pair_cost(engine, control, Config.model_validate(OPTIONS), model_dir)
    worker, outlets = ObservedWorker(engine, notes), Metrics()
    pool = Pool(
        Config.model_validate(OPTIONS),
        worker,
        control,
        OneDamage(rank, notes) if engine.is_mp_source else None,
        outlets,
        step=0,
        run_start_s=0.0,
        quadratic=notes["pair_cost"],
        on_version=lambda version: None,
    )
    pool.run()
    notes |= {"micro_batches": engine.micro_batches, "steps": engine.steps, "metrics": outlets.lines}
    notes["weights"] = sum(float(tensor.double().abs().sum()) for _, tensor in engine.named_tensors())
    notes["failure"] = raised(lambda: worker.replica.groups(timeout), (PeerTimeout, ProcessDied))
    notes["two sources"] = raised(lambda: Replica(Claims(engine), 120.0), EngineError)
    return notes, worker


def timeout() -> Fetched:
    raise PeerTimeout("no answer within 1 s")


def raised(call: Callable[[], Any], kinds: Any) -> str:
    with pytest.raises(kinds) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


class Claims:
    """Each rank says that it is the source."""

    is_mp_source = True

    def __init__(self, engine: Engine) -> None:
        self.model_parallel_group = engine.model_parallel_group


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), key_heads=2)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> list[list[Notes]]:
    out = tmp_path_factory.mktemp("ranks") / "notes"
    run_ranks(4, _rank, model_dir, str(out))
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(4)]


@pytest.fixture(params=[0, 1], ids=["first rank is source", "last rank is source"])
def source(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def ranks(both: list[list[Notes]], source: int) -> list[Notes]:
    return [runs[source] for runs in both]


def on_sources(source: int, first: Any, second: Any, elsewhere: Any = None) -> list[Any]:
    return [first, elsewhere, second, elsewhere] if source == 0 else [elsewhere, first, elsewhere, second]


def test_ranks_0_and_1_train_trajectories_0_to_2_and_ranks_2_and_3_the_others(ranks: list[Notes]):
    first, second = (content(group) for group in prompts().values())
    assert [notes["trained"] for notes in ranks] == [[first], [first], [second], [second]]


def test_only_sources_fetch_and_a_damaged_payload_is_given_back_once(ranks: list[Notes], source: int):
    assert [notes.get("fetched") for notes in ranks] == on_sources(source, [[0], [0]], [[1], [1]])
    assert [notes.get("returned") for notes in ranks] == on_sources(source, [[]], [[1]])


def test_only_sources_return_results_and_log_probs_and_the_first_of_them_reports(ranks: list[Notes], source: int):
    assert [notes["result"] for notes in ranks] == on_sources(source, [2, 60], [2, 60])
    assert [notes["scored"] for notes in ranks] == on_sources(source, 3, 3, 0)
    assert [len(notes["metrics"]) for notes in ranks] == on_sources(source, 1, 0, 0)


def test_two_epochs_of_three_micro_batches_are_two_optimizer_updates_and_not_six(ranks: list[Notes]):
    assert [notes["steps"] for notes in ranks] == [2] * 4
    assert [notes["micro_batches"] for notes in ranks] == [[10] * 6] * 4


@pytest.fixture(scope="module")
def alone(model_dir: str) -> tuple[StepResult, float]:
    """The same step on one rank, and the sum of its weights."""
    one_rank()
    engine = FSDP2Engine(spec(model_dir, micro_batch_tokens=10, shared_prompt=False, warmup_steps=0))
    engine.initialize()
    worker = TrainingWorker(engine, Config.model_validate(OPTIONS).algorithm)
    some = PlanSettings(replicas=1, mini_batches=1, keep_no_signal=False, shared_prompt=False, quadratic=0.0)
    result = worker.train_step(plan_step(0, [g.meta() for g in prompts().values()], some, recompute=True), prompts(), lambda: False)
    assert result is not None
    return result, sum(float(tensor.double().abs().sum()) for _, tensor in engine.named_tensors())


def test_no_replica_is_counted_twice(ranks: list[Notes], source: int, alone: tuple[StepResult, float]):
    (line,) = ranks[source]["metrics"]
    assert (line["packed_tokens"], line["trained_tokens"], line["updates"]) == (120, 36, 2)
    result, total = alone
    for name in ("loss", "grad_norm", "entropy", "mismatch_kl", "drift"):
        assert line[name] == pytest.approx(result.statistics[name], rel=1e-4, abs=1e-6), name
    assert [notes["weights"] for notes in ranks] == pytest.approx([total] * 4, rel=1e-6)


def test_all_ranks_take_the_price_of_a_pair_that_the_leader_measured(ranks: list[Notes], source: int):
    assert [notes["pair_cost"] for notes in ranks] == [2.0 + 0.1 * source] * 4  # from passes of rows of 10 and of 2


def test_a_source_that_fails_says_so_to_its_replica(ranks: list[Notes], source: int):
    for replica in (0, 2):
        fetches, waits = replica + source, replica + 1 - source
        assert ranks[fetches]["failure"] == "PeerTimeout: no answer within 1 s"
        expected = f"ProcessDied: learner-{fetches} fetches for learner-{waits} and failed: PeerTimeout: no answer within 1 s"
        assert ranks[waits]["failure"] == expected


def test_a_source_that_is_gone_is_noticed(both: list[list[Notes]]):
    assert both[3][0]["gone"].startswith("ProcessDied: a rank of the replica of learner-3 is gone")


def test_a_replica_has_one_source_and_a_learner_at_least_one(both: list[list[Notes]]):
    assert both[1][0]["two sources"] == "EngineError: one rank of a replica is its source; met [0, 1] among [0, 1]"
    assert both[1][0]["no source"] == "EngineError: a source leads the ranks of a learner; none of 4 says is_mp_source"
