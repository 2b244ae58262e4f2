"""What a benchmark reports: named numbers, each with its floor and goal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Figure", "table", "write_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number.

    Attributes:
        name: what was measured; value: median of the repeats, None if it could not be; unit: of the value.
        floor: the same unit for the unavoidable work, measured beside it; ratio: value / floor.
        goal: what ``ratio``, or ``value`` where there is no floor, is held against.
        holds: whether it meets the goal; None without a goal or a value.
        note: why there is no value.
    """

    name: str
    value: float | None
    unit: str
    floor: float | None = None
    ratio: float | None = None
    goal: float | None = None
    holds: bool | None = None
    note: str = ""


def write_json(path: Path, figures: Sequence[Figure]) -> None:
    """A list of objects, one a figure."""
    path.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")


def table(figures: Sequence[Figure]) -> str:
    """Aligned lines for people."""
    rows = [("name", "value", "unit", "floor", "ratio", "goal", "holds")]
    rows += [(f.name, _text(f.value), f.unit, _text(f.floor), _text(f.ratio), _text(f.goal), f.note or _word(f.holds)) for f in figures]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows)


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def _word(holds: bool | None) -> str:
    return {True: "yes", False: "NO", None: "-"}[holds]
