"""CPU seconds: of one memcpy, and of all processes that one measurement started.

A measured cell runs in a process of its own whose environment carries a mark; everything that it starts inherits the mark, whoever
its parent becomes, and is found by it in /proc. Times are user and system seconds of all threads, at the kernel's tick of 10 ms.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

__all__ = ["MARK", "marked_cpu_s", "memcpy_s_per_gb", "process_cpu_s"]

MARK = "ASYNCRL_BENCH_CELL"
_BUFFER_BYTES = 256 << 20


def memcpy_s_per_gb(repeats: int = 5) -> float:
    """Median CPU seconds of copying 1e9 bytes between buffers of 256 MiB, far larger than any cache."""
    source, target = (np.ones(_BUFFER_BYTES, np.uint8) for _ in range(2))
    times = []
    for _ in range(repeats):
        before = time.process_time()
        np.copyto(target, source)
        times.append((time.process_time() - before) / (_BUFFER_BYTES / 1e9))
    return float(np.median(times))


def marked_cpu_s(mark: str) -> dict[int, float]:
    """CPU seconds so far of each living process whose environment has the mark, by process id."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = _cpu_s(folder)
        except OSError:
            continue  # it ended meanwhile, or it is another user's
    return found


def process_cpu_s(process: int) -> float:
    """CPU seconds so far of one process."""
    return _cpu_s(Path(f"/proc/{process}"))


def _cpu_s(folder: Path) -> float:
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
