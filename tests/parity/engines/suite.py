"""The suite as the tests use it: gives orders to the ranks, keeps plain runs, and judges cells once a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from engines.batches import steps
from engines.cells import CELLS, Cell
from engines.checks import check_change, check_layout, check_scores, check_steps, check_tokens
from engines.models import write_model
from engines.ranks import RankPool
from engines.reference import plain_run
from engines.resharding import Hop, hop
from engines.results import RankRun, Run
from engines.target import Target
from engines.work import OPTIONS, Fault, Order, work

__all__ = ["Suite", "Verdict", "cells_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Worst deviations that a cell was met with; :class:`~engines.target.Bounds` says in what.

    ``change`` is of the SGD run, and so is what ``prediction`` covers of scoring; everything else is the worst of both runs.
    """

    prediction: float
    token_loss: float
    loss: float
    norm: float
    change: float

    def worst(self, other: Verdict) -> Verdict:
        """The larger of each figure."""
        return Verdict(**{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


def cells_of(target: Target) -> tuple[Cell, ...]:
    """The cells for which the target has ranks enough, and that are not refused there."""
    return tuple(cell for cell in CELLS if cell.ranks <= target.most_ranks and (target.device == "cpu" or not cell.only_cpu))


class Suite:
    """Everything that is paid for once a session.

    Args:
        folder: for models; target: device and precision of the engines.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        self.target = target
        self._folder = folder
        self._pool = RankPool(most_ranks=target.most_ranks, device=target.device, collectives=target.collectives)
        self._models: dict[str, str] = {}
        self._plain: dict[tuple[str, str, tuple[tuple[str, Any], ...]], Run] = {}
        self._runs: dict[tuple[str, str, bool, Fault | None], list[RankRun]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.close()

    def verdict(self, cell: Cell, *, shared_prompt: bool) -> Verdict:
        """The cell against the plain process, in both runs.

        Raises:
            Deviates: a figure is beyond its bound.
            RanksFailed: the cell did not run.
        """
        adamw, sgd = (self._compared(cell, optimizer, shared_prompt) for optimizer in ("adamw", "sgd"))
        return adamw.worst(sgd)

    def _compared(self, cell: Cell, optimizer: str, shared_prompt: bool) -> Verdict:
        bounds, ranks = self.target.bounds_of(cell.model), self.ranks_run(cell, optimizer, shared_prompt=shared_prompt)
        plain = self.plain_run(cell, optimizer, adapters=ranks[0].adapters)
        check_layout(ranks, cell)
        prediction, token_loss = check_tokens(ranks, plain, bounds)
        loss, norm = check_steps(ranks, plain, bounds)
        change = 0.0
        if optimizer == "sgd":
            change = check_change(ranks, plain, bounds)
            prediction = max(prediction, check_scores([rank.scored for rank in ranks], plain, bounds))
        if optimizer == "sgd" and cell.learner.get("lora_rank"):
            prediction = max(prediction, check_scores([rank.reference for rank in ranks], plain, bounds, "with adapters off"))
        return Verdict(prediction=prediction, token_loss=token_loss, loss=loss, norm=norm, change=change)

    def ranks_run(self, cell: Cell, optimizer: str, *, shared_prompt: bool = True, fault: Fault | None = None) -> list[RankRun]:
        """One run of a cell, perhaps with a planted fault; the same one runs once a session."""
        key = str(cell), optimizer, shared_prompt, fault
        if key not in self._runs:
            order = replace(self.order(cell), shared_prompt=shared_prompt, optimizer=optimizer, fault=fault)
            if fault is not None:  # one percent of a gradient is less than bfloat16 rounds away
                order = replace(order, target=replace(self.target, dtype="float32"))
            name = f"{cell}, {optimizer}, shared_prompt={shared_prompt}, fault={fault}"
            self._runs[key] = self._pool.run(name, cell.ranks, work, order)
        return self._runs[key]

    def hop(self, cell: Cell, *, start: Path | None, step: int, end: Path) -> list[list[tuple[float, float]]]:
        """What each rank of a cell trained from one checkpoint on, past another; see :func:`engines.resharding.hop`."""
        work = Hop(order=self.order(cell), start=None if start is None else str(start), step=step, end=str(end))
        return self._pool.run(f"{cell} from step {step} of {start}", cell.ranks, hop, work)

    def give(self, name: str, ranks: int, work: Callable[[Any], Any], order: Any) -> list[Any]:
        """Any other order to the ranks; their answers."""
        return self._pool.run(name, ranks, work, order)

    def order(self, cell: Cell) -> Order:
        """AdamW over shared prompts, nothing planted."""
        return Order(cell=cell, target=self.target, model_dir=self._model(cell.model), shared_prompt=True, optimizer="adamw")

    def plain_run(self, cell: Cell, optimizer: str, *, adapters: Mapping[str, np.ndarray] | None = None) -> Run:
        """The plain process on the cell's model, with the options that change what is computed."""
        changing = {name: cell.learner[name] for name in ("lora_rank", "lora_alpha", "router_loss") if name in cell.learner}
        key = cell.model, optimizer, tuple(changing.items())
        if key not in self._plain:
            self._plain[key] = plain_run(
                self._model(cell.model),
                steps(cell.model_type),
                optimizer,
                OPTIONS[optimizer] | changing,
                value=cell.model_type == "value_model",
                adapters=adapters,
            )
        return self._plain[key]

    def _model(self, family: str) -> str:
        if family not in self._models:
            self._models[family] = write_model(self._folder / family.replace(" ", "-"), family)
        return self._models[family]
