"""Pure comparisons of what ranks handed back with the plain run: each returns the worst deviation, or raises with the figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np

from engines.cells import Cell
from engines.results import RankRun, Run, TokenKey, TokenValues
from engines.target import Bounds

__all__ = ["Deviates", "check_change", "check_layout", "check_scores", "check_steps", "check_tokens", "trained_tokens"]

_ROUNDINGS = 4 * 2.0**-24  # of a float32 weight, over three steps and two ways to add up


class Deviates(AssertionError):
    """An engine does not do what the plain process does."""


def check_layout(ranks: Sequence[RankRun], cell: Cell) -> None:
    """The engine has the replicas that the cell asks for, each with one source."""
    met = sorted(rank.replica for rank in ranks if rank.is_source)
    if met != list(range(cell.replicas)) or {rank.replicas for rank in ranks} != {cell.replicas}:
        raise Deviates(
            f"{cell} has {cell.replicas} replicas with one source each; met sources of {met}, sizes {[r.replicas for r in ranks]}"
        )


def check_scores(scores: Sequence[Mapping[TokenKey, float]], plain: Run, bounds: Bounds, when: str = "at the start") -> float:
    """Predictions that sources return for the first step's tokens are those of the plain process before any update."""
    scored: dict[TokenKey, float] = {}
    for returned in scores:
        if returned.keys() & scored.keys():
            raise Deviates(f"tokens are scored once; met twice {sorted(returned.keys() & scored.keys())[:3]}")
        scored |= returned
    _same_tokens(scored.keys(), plain.tokens[0].keys(), "scored")
    return _within(
        _worst((scored[key], plain.tokens[0][key].prediction) for key in scored), bounds.prediction, f"prediction for a token scored {when}"
    )


def check_tokens(ranks: Sequence[RankRun], plain: Run, bounds: Bounds) -> tuple[float, float]:
    """Each token of each step was trained once, with the plain process's prediction and loss; the worst deviations of both."""
    prediction = loss = 0.0
    for step, expected in enumerate(plain.tokens):
        found = trained_tokens(ranks, step, bounds)
        _same_tokens(found.keys(), expected.keys(), f"trained in step {step}")
        prediction = max(prediction, _worst((found[key].prediction, expected[key].prediction) for key in found))
        loss = max(loss, _worst((found[key].loss, expected[key].loss) for key in found))
    return _within(prediction, bounds.prediction, "prediction for a trained token"), _within(loss, bounds.token_loss, "loss of a token")


def trained_tokens(ranks: Sequence[RankRun], step: int, bounds: Bounds) -> Mapping[TokenKey, TokenValues]:
    """Tokens of one step over all ranks. Ranks of one replica may each see a part, or the same ones; replicas never share one."""
    owner: dict[TokenKey, int] = {}
    found: dict[TokenKey, TokenValues] = {}
    for rank in ranks:
        mine = dict(rank.tokens[step])
        if len(mine) != len(rank.tokens[step]):
            raise Deviates(f"a replica trains a token once a step; replica {rank.replica} trained some twice in step {step}")
        for key, values in mine.items():
            if owner.setdefault(key, rank.replica) != rank.replica:
                raise Deviates(f"token {key} was trained twice in step {step}: by replicas {owner[key]} and {rank.replica}")
            if key in found:
                _within(
                    abs(found[key].prediction - values.prediction),
                    bounds.prediction,
                    f"prediction for token {key} between ranks of a replica",
                )
            found[key] = values
    return found


def check_steps(ranks: Sequence[RankRun], plain: Run, bounds: Bounds) -> tuple[float, float]:
    """Loss and gradient norm of each step, on every rank; the worst deviations, relative to the larger of one and the value."""
    loss = _worst((f, e) for rank in ranks for f, e in zip(rank.losses, plain.losses, strict=True))
    norm = _worst((f / max(1.0, e), e / max(1.0, e)) for rank in ranks for f, e in zip(rank.norms, plain.norms, strict=True))
    return _within(loss, bounds.step, "loss of a step"), _within(norm, bounds.step, "gradient norm of a step")


def check_change(ranks: Sequence[RankRun], plain: Run, bounds: Bounds) -> float:
    """‖(w₃ − w₀) − plain (w₃ − w₀)‖ / ‖plain (w₃ − w₀)‖ over all weights, and for each tensor alone with room for rounding."""
    (rank,) = (rank for rank in ranks if rank.end)
    if rank.end.keys() != plain.end.keys():
        raise Deviates(f"exported names are those of the plain model; differing: {sorted(rank.end.keys() ^ plain.end.keys())[:3]}")
    unequal = [name for name, tensor in plain.start.items() if not np.array_equal(tensor, rank.start[name])]
    if unequal:
        raise Deviates(f"weights at the start are those of the folder; others in {unequal[:3]}")
    squares = np.zeros(2)
    for name, last in plain.end.items():
        first = plain.start[name].astype(np.float64)
        change = last - first
        off = rank.end[name] - rank.start[name].astype(np.float64) - change
        limit = bounds.tensor * _norm(change) + _ROUNDINGS * _norm(first)
        if not _norm(off) <= limit:
            raise Deviates(f"change of {name} is off by {_norm(off):.3g}, limit {limit:.3g}, of a change of {_norm(change):.3g}")
        squares += np.array([_norm(off) ** 2, _norm(change) ** 2])
    return _within(math.sqrt(squares[0] / squares[1]), bounds.change, "relative difference of w3 - w0")


def _same_tokens(found: Set[TokenKey], expected: Set[TokenKey], what: str) -> None:
    if found != expected:
        missing, others = sorted(expected - found)[:3], sorted(found - expected)[:3]
        raise Deviates(f"other tokens were {what} than the plain process has: missing {missing}, too many {others}")


def _worst(pairs: Iterable[tuple[float, float]]) -> float:
    worst = 0.0
    for found, expected in pairs:
        off = abs(found - expected)
        worst = off if not off <= worst else worst  # a NaN stays
        if math.isnan(worst):
            break
    return worst


def _within(deviation: float, bound: float, what: str) -> float:
    if not deviation <= bound:
        raise Deviates(f"{what} deviates by {deviation:.3g}, bound {bound:.3g}")
    return deviation


def _norm(tensor: np.ndarray) -> float:
    return float(np.linalg.norm(tensor.ravel()))
