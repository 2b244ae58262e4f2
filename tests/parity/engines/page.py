"""docs/engines.md, from the suite's verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from engines.batches import DEALS
from engines.cells import Cell
from engines.suite import Verdict
from engines.target import Bounds

__all__ = ["figures_of", "limits", "render", "rounded_up", "row_of"]

_HEAD = """# What each engine agrees on

Written by the conformance suite; do not edit. To write it again:

    ASYNCRL_CONFORMANCE_PAGE=docs/engines.md python -m pytest tests/parity/engines

Each row is a layout of an engine over gloo, in float32, against one plain process: an unwrapped Hugging Face model that takes one
trajectory at a time. Every cell runs with prompts shared and repeated, and trains three steps with AdamW and three with SGD:
{deals}.
A step without any row follows. Figures are the worst of all that, rounded up to one digit:

- *prediction* for any sampled token, scored or trained: its log-prob in nats, or its value; *token loss*: the loss of that token;
- *loss* and *gradient norm* of any step, relative to the larger of one and the value;
- *change*: ‖(w₃ − w₀) − plain (w₃ − w₀)‖ / ‖plain (w₃ − w₀)‖ after three SGD steps, over all weights.

A gradient that is 1 % too long in one parameter, gradients that are counted twice, a row that two replicas train, and attention
that sees the sequence packed before are planted by `tests/parity/engines/test_planted_faults.py`, and each fails these bounds.

"""
_TABLE = """| engine | cell | ranks | replicas | model | options | prediction | token loss | loss | gradient norm | change |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def render(verdicts: Sequence[tuple[Cell, Verdict]], bounds: Bounds) -> str:
    """The page."""
    rows = [("bound", "", "", "", "", "", *(f"{limit:.0e}" for limit in limits(bounds)))]
    rows += [(*row_of(cell), *(rounded_up(figure) for figure in astuple(verdict))) for cell, verdict in verdicts]
    lines = "".join("| " + " | ".join(row) + " |\n" for row in rows)
    return _HEAD.format(deals="; then ".join(DEALS)) + _TABLE + lines


def row_of(cell: Cell) -> tuple[str, ...]:
    """What a row says of its cell, before the figures."""
    options = ", ".join(f"{name}={value}" for name, value in cell.learner.items())
    return cell.backend, cell.name, str(cell.ranks), str(cell.replicas), cell.model, options


def limits(bounds: Bounds) -> tuple[float, ...]:
    """The bound of each figure, in the order of the columns."""
    return bounds.prediction, bounds.token_loss, bounds.step, bounds.step, bounds.change


def rounded_up(figure: float) -> str:
    """One significant digit, never less than the figure.

    Example:
        >>> rounded_up(1.61e-6), rounded_up(9.1e-6), rounded_up(0.0)
        ('2e-06', '1e-05', '0e+00')
    """
    if figure == 0.0:
        return f"{figure:.0e}"
    unit = 10.0 ** math.floor(math.log10(figure))
    return f"{math.ceil(figure / unit) * unit:.0e}"


def figures_of(page: str) -> Mapping[tuple[str, ...], tuple[float, ...]]:
    """The figures of a page by what :func:`row_of` says of the cell."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [[entry.strip() for entry in line.strip("| ").split(" |")] for line in lines]
    return {tuple(row[:6]): tuple(float(figure) for figure in row[6:]) for row in cells if row[0] not in ("engine", "bound")}
