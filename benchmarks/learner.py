"""The learner on a CPU: the FSDP2 engine against a bare loop, and what shared prompts, balanced dispatch and chunked log-probs save.

The arithmetic recipe's data and its SmolLM2-135M in float32 on one core; a random model of 4 layers for the long tail. Sides of a figure
take turns within one process, a repeat's ratio is that of neighbours in time, and a figure is the median of the repeats; memory is
measured once, since it does not vary. Processes run one after another; this one waits for each of them, under a deadline.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.config import ModelConfig
from asyncrl.errors import AsyncRLError
from asyncrl.launch.models import prepare_model
from asyncrl.launch.start import model_cache
from benchmarks.children import run_child
from benchmarks.figures import Figure

__all__ = ["GOALS", "dispatch_figures", "memory_figures", "run", "step_figures"]

MODEL = ModelConfig(path="builtin:smollm2-135m-instruct")

TOKENS = "trained tokens/s against a bare loop, recipe=arithmetic"
COMPUTED = "tokens computed, prompts counted once, recipe=arithmetic"
PADDING = "padding computed, recipe=arithmetic"
GROUPS = "groups/s with shared prompts, without, recipe=arithmetic"
DISPATCH = "long-tailed step over 2 ranks, balanced, round robin"
MEMORY = "peak memory of log-probs, vocabulary 151936, chunked, dense"

GOALS: dict[str, float] = {TOKENS: 0.93, COMPUTED: 1.1, PADDING: 0.0, GROUPS: 1.0, DISPATCH: 1.0, MEMORY: 0.1}
"""Least ratio of rates, largest ratio of times, tokens and bytes."""


def run(repeats: int = 3) -> list[Figure]:
    """All rows; a part that fails says why and holds nothing."""
    return [
        *_part((TOKENS, COMPUTED, PADDING, GROUPS), lambda: step_figures(_steps(repeats))),
        *_part((DISPATCH,), lambda: dispatch_figures(run_child("benchmarks.learner_dispatch", str(repeats), timeout_s=300.0))),
        *_part((MEMORY,), lambda: memory_figures(*(_peak_bytes(form) for form in ("chunked", "dense")))),
    ]


def step_figures(steps: dict[str, Any]) -> list[Figure]:
    """Figures of what :mod:`benchmarks.learner_steps` printed."""
    engine, bare, unshared = steps["engine_s"], steps["bare_s"], steps["unshared_s"]
    padding = float(steps["padding"])
    return [
        _rates(TOKENS, "tokens/s", steps["trained"], engine, bare),
        _least(COMPUTED, "tokens", [steps["computed"]], [steps["distinct"]]),
        Figure(name=PADDING, value=padding, unit="tokens", goal=GOALS[PADDING], holds=padding == GOALS[PADDING]),
        _rates(GROUPS, "groups/s", steps["groups"], engine, unshared),
    ]


def dispatch_figures(times: dict[str, list[float]]) -> list[Figure]:
    """Figures of what :mod:`benchmarks.learner_dispatch` printed."""
    return [_least(DISPATCH, "s", times["balanced_s"], times["round_robin_s"])]


def memory_figures(chunked_bytes: int, dense_bytes: int) -> list[Figure]:
    """Figures of what :mod:`benchmarks.learner_head` printed for each form."""
    return [_least(MEMORY, "MiB", [chunked_bytes / 2**20], [dense_bytes / 2**20])]


def _steps(repeats: int) -> dict[str, Any]:
    model_dir = prepare_model(MODEL, model_cache())
    return dict(run_child("benchmarks.learner_steps", str(model_dir), str(repeats), timeout_s=900.0))


def _peak_bytes(form: str) -> int:
    return int(run_child("benchmarks.learner_head", form, timeout_s=120.0)["peak_bytes"])


def _rates(name: str, unit: str, amount: float, ours_s: Sequence[float], floor_s: Sequence[float]) -> Figure:
    """How many times as fast as the floor, whose rate is the other column."""
    ratio = statistics.median(floor / ours for ours, floor in zip(ours_s, floor_s, strict=True))
    value, floor = (amount / statistics.median(seconds) for seconds in (ours_s, floor_s))
    return Figure(name=name, value=value, unit=unit, floor=floor, ratio=ratio, goal=GOALS[name], holds=ratio >= GOALS[name])


def _least(name: str, unit: str, ours: Sequence[float], floor: Sequence[float]) -> Figure:
    """The part of the floor that is spent."""
    ratio = statistics.median(own / other for own, other in zip(ours, floor, strict=True))
    value, below = statistics.median(ours), statistics.median(floor)
    return Figure(name=name, value=value, unit=unit, floor=below, ratio=ratio, goal=GOALS[name], holds=ratio <= GOALS[name])


def _part(names: Sequence[str], measure: Callable[[], list[Figure]]) -> list[Figure]:
    try:
        return measure()
    except AsyncRLError as error:
        note = " ".join(str(error).split())[-300:]
        return [Figure(name=name, value=None, unit="", goal=GOALS[name], note=note) for name in names]
