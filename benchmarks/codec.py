"""CPU time of encoding a group into frames and of reading it back with every check, beside a memcpy of the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from asyncrl.trajectory import decode_group, encode_group_frames
from benchmarks.cpu import memcpy_s_per_gb
from benchmarks.figures import Figure
from benchmarks.groups import NUM_TRAJECTORIES, make_group, token_bytes

__all__ = ["figures"]


def figures(trajectory_mb: float, repeats: int = 3) -> list[Figure]:
    """Encoding and decoding of one group of 64 trajectories."""
    group = make_group(NUM_TRAJECTORIES, trajectory_mb)
    payload = b"".join(encode_group_frames(group))
    gigabytes = token_bytes(group) / 1e9
    floor = memcpy_s_per_gb()
    works: dict[str, Callable[[], Any]] = {"encode": lambda: encode_group_frames(group), "decode": lambda: decode_group(payload)}
    found = []
    for name, work in works.items():
        value = statistics.median(_cpu_s(work) for _ in range(repeats)) / gigabytes
        title = f"{name} {NUM_TRAJECTORIES} x {trajectory_mb:g} MB"
        found.append(Figure(name=title, value=value, unit="CPU s/GB", floor=floor, ratio=value / floor))
    return found


def _cpu_s(work: Callable[[], Any]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before
