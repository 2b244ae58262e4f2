"""The queue's payload path against one memcpy and against its peers.

Every carrier moves groups of 64 trajectories of about 1 MB and 8 MB from one process to another; the receiver sums up what it got.
Inside a figure of the queue are checksums at both ends, the whole state machine and, for ``ipc_synced``, the log and its wait for the
disk; encoding and decoding have rows of their own, and so has the state machine with metadata alone, in groups a second.
Carriers take turns, so that a change of the machine's load meets all of them; a repeat's floor is the memcpy measured before and after it,
and a figure is the median of the repeats. It waits for its cells only, each under a deadline.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.errors import AsyncRLError
from benchmarks.cells import CARRIERS, Carried, run_cell
from benchmarks.codec import figures as codec_figures
from benchmarks.cpu import memcpy_s_per_gb
from benchmarks.figures import Figure
from benchmarks.queue_rates import figures as rate_figures

__all__ = ["GOALS", "SIZES_MB", "Measured", "carry_all", "figures_of", "run"]

SIZES_MB = (1.0, 8.0)
GOALS: dict[str, float] = {"shm": 3.0, "ipc": 6.0, "tcp": 9.0, "ipc_synced": 12.0}
"""Highest CPU time per byte, in memcpys, by carrier; peers have none."""

PEERS = ("ray_queue", "transfer_queue")
TIMES_CHEAPER = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One repeat of one cell and its floor in CPU seconds per 1e9 bytes."""

    carrier: str
    trajectory_mb: float
    floor: float
    carried: Carried


def run(repeats: int = 3) -> list[Figure]:
    """All rows: carriers, codec, groups a second."""
    codec = [figure for trajectory_mb in SIZES_MB for figure in codec_figures(trajectory_mb)]
    return [*carry_all(repeats), *codec, *rate_figures(repeats)]


def carry_all(
    repeats: int = 3,
    rounds: int = 3,
    *,
    carriers: Sequence[str] = tuple(CARRIERS),
    sizes_mb: Sequence[float] = SIZES_MB,
    cell: Callable[[str, float, int], Carried] = run_cell,
    floor: Callable[[], float] = memcpy_s_per_gb,
) -> list[Figure]:
    """Measures all carriers at all sizes; one that failed is not tried again. ``cell`` and ``floor`` are exchanged only in tests."""
    measured: list[Measured] = []
    failed: dict[tuple[str, float], Carried] = {}
    for _ in range(repeats):
        for trajectory_mb in sizes_mb:
            for carrier in carriers:
                key = (carrier, trajectory_mb)
                if key in failed:
                    continue
                before = floor()
                carried = _carried(cell, carrier, trajectory_mb, rounds)
                if carried.missing:
                    failed[key] = carried
                measured.append(Measured(carrier=carrier, trajectory_mb=trajectory_mb, floor=(before + floor()) / 2, carried=carried))
    return figures_of(measured)


def _carried(cell: Callable[[str, float, int], Carried], carrier: str, trajectory_mb: float, rounds: int) -> Carried:
    try:
        return cell(carrier, trajectory_mb, rounds)
    except AsyncRLError as error:
        return Carried(missing=" ".join(str(error).split())[-300:])


def figures_of(measured: Sequence[Measured]) -> list[Figure]:
    """Medians by carrier and size, then how many times cheaper each of ours is than each peer."""
    figures: dict[tuple[str, float], Figure] = {}
    for one in measured:
        key = (one.carrier, one.trajectory_mb)
        if key not in figures:
            figures[key] = _median(*key, [m for m in measured if (m.carrier, m.trajectory_mb) == key])
    ours = [key for key in figures if key[0] not in PEERS]
    peers = [key for key in figures if key[0] in PEERS]
    cheaper = [_cheaper(f, p, figures) for f in ours for p in peers if f[1] == p[1]]
    return [*figures.values(), *cheaper]


def _median(carrier: str, trajectory_mb: float, repeats: Sequence[Measured]) -> Figure:
    name, unit = f"{carrier} 64 x {trajectory_mb:g} MB", "CPU s/GB"
    missing = next((m.carried.missing for m in repeats if m.carried.missing), "")
    if missing:
        return Figure(name=name, value=None, unit=unit, goal=GOALS.get(carrier), note=missing)
    ratio = statistics.median(m.carried.s_per_gb / m.floor for m in repeats)
    goal = GOALS.get(carrier)
    return Figure(
        name=name,
        value=statistics.median(m.carried.s_per_gb for m in repeats),
        unit=unit,
        floor=statistics.median(m.floor for m in repeats),
        ratio=ratio,
        goal=goal,
        holds=None if goal is None else ratio <= goal,
    )


def _cheaper(ours: tuple[str, float], peer: tuple[str, float], figures: dict[tuple[str, float], Figure]) -> Figure:
    name = f"{ours[0]} against {peer[0]}, 64 x {ours[1]:g} MB"
    mine, theirs = figures[ours], figures[peer]
    if mine.ratio is None or theirs.ratio is None:
        return Figure(name=name, value=None, unit="times cheaper", goal=TIMES_CHEAPER, note=mine.note or theirs.note)
    times = theirs.ratio / mine.ratio
    return Figure(name=name, value=times, unit="times cheaper", goal=TIMES_CHEAPER, holds=times >= TIMES_CHEAPER)
