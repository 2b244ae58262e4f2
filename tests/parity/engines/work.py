"""What one rank does for one run of one cell: build the engine, score, train three steps, hand back what it saw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.algorithms.losses import STATISTICS, Denominators
from asyncrl.config import Config
from asyncrl.learner.batch import Batch, Row, TrainOutput
from asyncrl.learner.engine import Engine, EngineSpec
from asyncrl.learner.registry import EngineRegistry
from engines.adapters import ADAPTERS
from engines.batches import STEPS, deal, denominators, key_of, steps
from engines.cells import Cell
from engines.recorder import PolicyRecorder, Recorder, ValueRecorder
from engines.results import RankRun, TokenKey
from engines.target import Target

__all__ = ["OPTIONS", "Fault", "Order", "engine_of", "train_more", "work"]

OPTIONS: dict[str, dict[str, Any]] = {
    # an epsilon that keeps a gradient of rounding size from becoming a full step
    "adamw": {"learning_rate": 1e-3, "epsilon": 1e-5, "grad_clip": 1.0},
    # no clipping, which would hide a gradient that is too long
    "sgd": {"learning_rate": 0.05, "epsilon": 1e-5, "grad_clip": 1e6},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A planted error.

    ``gradient``: that of the parameter ``name`` is 1 % too long. ``gradients twice``: all are, by a factor of two. ``leak``: sequences
    see the one packed before them. ``row twice``: a row is trained by every replica.
    """

    kind: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One run; every rank of it gets the same."""

    cell: Cell
    target: Target
    model_dir: str
    shared_prompt: bool
    optimizer: str
    fault: Fault | None = None


def work(order: Order) -> RankRun:
    """Runs an order on this rank; the process group is open."""
    adapter, engine = ADAPTERS[order.cell.backend], engine_of(order)
    if order.optimizer == "sgd":
        adapter.use_sgd(engine)
    _plant(order, engine)
    thorough = order.optimizer == "sgd"  # one of the two runs is enough to score and to compare weights
    start, adapters = _whole(adapter.weights(engine) if thorough else ()), _whole(adapter.low_rank(engine))
    scored = _score(order, engine) if thorough else {}
    trained = [_train(order, engine, step) for step in range(STEPS)]
    _train_nothing(order, engine)
    return RankRun(
        replica=engine.data_parallel_rank,
        replicas=engine.data_parallel_size,
        is_source=engine.is_mp_source,
        scored=scored,
        reference=_score(order, engine, adapters=False) if thorough and order.cell.learner.get("lora_rank") else {},
        adapters=adapters,
        tokens=tuple(tuple(recorder.seen) for recorder, _ in trained),
        micro_batches=tuple(recorder.calls for recorder, _ in trained),
        packed_tokens=tuple(output.packed_tokens for _, output in trained),
        losses=tuple(_loss(order, output) for _, output in trained),
        norms=tuple(output.grad_norm for _, output in trained),
        start=start,
        end=_whole(adapter.weights(engine) if thorough else ()),
    )


def _train(order: Order, engine: Engine, step: int) -> tuple[Recorder, TrainOutput]:
    rows = steps(order.cell.model_type)[step]
    mine = _mine(order, engine, rows, step)
    recorder = _recorder(order, mine)
    batch = Batch(rows_N=mine, denominators=denominators(rows))
    output = engine.train_batch(batch, recorder, should_stop=_never, rescale=lambda sums: 1.0)
    assert output.stepped, output.skipped
    return recorder, output


def _train_nothing(order: Order, engine: Engine) -> None:
    # no row on any replica: every collective runs, nothing moves, which the weights at the end show
    batch = Batch(rows_N=(), denominators=Denominators(tokens=0, trajectories=0))
    output = engine.train_batch(batch, _recorder(order, ()), should_stop=_never, rescale=lambda sums: None)
    assert not output.stepped


def train_more(order: Order, engine: Engine, numbers: range) -> list[tuple[float, float]]:
    """(Loss, gradient norm) of the steps with these numbers; after the third the rows come round again."""
    trained = (_train(order, engine, number % STEPS)[1] for number in numbers)
    return [(_loss(order, output), output.grad_norm) for output in trained]


def engine_of(order: Order) -> Engine:
    """The cell's engine, ready to train; the process group is open."""
    cell, target = order.cell, order.target
    options = {
        "engine": cell.backend,
        "ranks": cell.ranks,
        "device": target.device,
        "warmup_steps": 0,
        "micro_batch_tokens": 24,
        "shared_prompt": order.shared_prompt,
    }
    learner = Config.model_validate({"learner": options | OPTIONS[order.optimizer] | dict(cell.learner)}).learner
    build = EngineRegistry.find(model_type=cell.model_type, backend=cell.backend, device=target.device)
    engine = build(EngineSpec(model_dir=order.model_dir, dtype=target.dtype, device=target.device, learner=learner))
    engine.initialize()
    return engine


def _plant(order: Order, engine: Any) -> None:
    adapter, fault, step = ADAPTERS[order.cell.backend], order.fault, engine.optimizer_step
    if fault is None:
        return

    def step_too_far() -> tuple[float, bool]:
        adapter.gradient(engine, fault.name).mul_(1.01)
        return step()

    def step_twice_as_far() -> tuple[float, bool]:
        engine.scale_gradients(2.0)
        return step()

    if fault.kind == "leak":
        adapter.leak(engine)
    if fault.kind == "gradient":
        engine.optimizer_step = step_too_far
    if fault.kind == "gradients twice":
        engine.optimizer_step = step_twice_as_far


def _mine(order: Order, engine: Engine, rows: tuple[Row, ...], step: int) -> tuple[Row, ...]:
    mine = deal(rows, step, engine.data_parallel_rank, engine.data_parallel_size)
    if order.fault is not None and order.fault.kind == "row twice" and rows[0] not in mine:
        return (*mine, rows[0])
    return mine


def _score(order: Order, engine: Engine, *, adapters: bool = True) -> dict[TokenKey, float]:
    mine = deal(steps(order.cell.model_type)[0], 0, engine.data_parallel_rank, engine.data_parallel_size)
    batch = Batch(rows_N=mine, denominators=Denominators(tokens=0, trajectories=0))
    output = engine.infer_batch(batch, should_stop=_never, adapters=adapters)
    if not engine.is_mp_source:
        return {}
    return {
        (*key_of(row), column): float(predictions[column])
        for row, predictions in zip(mine, output.predictions_N, strict=True)
        for column in np.flatnonzero(row.trajectory.loss_mask).tolist()
    }


def _loss(order: Order, output: TrainOutput) -> float:
    return float(output.sums[STATISTICS.index("loss")]) + order.cell.learner.get("router_loss", 0.0) * output.router_loss


def _recorder(order: Order, rows: tuple[Row, ...]) -> Any:
    return (ValueRecorder if order.cell.model_type == "value_model" else PolicyRecorder)(rows)


def _whole(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    # collective: every rank drains it, one hands it back
    full = {name: tensor.float().cpu().numpy().copy() for name, tensor in tensors}
    return full if torch.distributed.get_rank() == 0 else {}


def _never() -> bool:
    return False
