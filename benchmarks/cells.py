"""One measured cell: a way to carry groups from one process to another, run in a process of its own.

``python -m benchmarks.cells NAME TRAJECTORY_MB ROUNDS`` carries ``ROUNDS`` groups of 64 trajectories after two that warm up, and prints
one JSON object. It waits only for the carrier itself; its caller (:func:`run_cell`) gives it a deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

from asyncrl.errors import AsyncRLError, UnsupportedError
from benchmarks.children import child_environment
from benchmarks.cpu import MARK, marked_cpu_s
from benchmarks.groups import NUM_TRAJECTORIES

__all__ = ["CARRIERS", "Carried", "Carrier", "run_cell"]

WARM_ROUNDS = 2

Carrier = Callable[[], int]
"""Carries the next group; returns its bytes after the receiver has found the sender's sum in what arrived."""

CARRIERS = {
    "shm": "benchmarks.queue_carrier",
    "ipc": "benchmarks.queue_carrier",
    "tcp": "benchmarks.queue_carrier",
    "ipc_synced": "benchmarks.queue_carrier",
    "ipc_relayed": "benchmarks.queue_carrier",
    "tcp_relayed": "benchmarks.queue_carrier",
    "ray_queue": "benchmarks.peer_ray",
    "transfer_queue": "benchmarks.peer_transfer_queue",
}
"""Module by name of the carrier; each has ``carrier(name, num_trajectories, trajectory_mb)``, a context manager that gives a
:data:`Carrier`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a cell measured; ``missing`` says what is not installed, and then nothing was measured."""

    cpu_s: float = 0.0
    num_bytes: int = 0
    num_groups: int = 0
    missing: str = ""

    @property
    def s_per_gb(self) -> float:
        """CPU seconds for 1e9 bytes."""
        return self.cpu_s / (self.num_bytes / 1e9)


def run_cell(name: str, trajectory_mb: float, rounds: int, *, timeout_s: float = 120.0) -> Carried:
    """Runs one cell in a new process, whose CPU time and that of all it starts is counted.

    Raises:
        AsyncRLError: it failed; the message has the end of what it wrote.
    """
    environment = child_environment(**{MARK: uuid.uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0"})
    command = [sys.executable, "-m", "benchmarks.cells", name, str(trajectory_mb), str(rounds)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        _end_marked(environment[MARK])
        raise AsyncRLError(f"cell {name} with {trajectory_mb} MB was not done after {timeout_s:g} s") from error
    if done.returncode:
        raise AsyncRLError(f"cell {name} with {trajectory_mb} MB ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return Carried(**json.loads(done.stdout.splitlines()[-1]))


def _end_marked(mark: str) -> None:
    """Ends what a cell that was killed left behind."""
    for process in marked_cpu_s(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def measure(carrier: Carrier, rounds: int, mark: str) -> Carried:
    """Carries warm-up groups, then ``rounds`` that count."""
    for _ in range(WARM_ROUNDS):
        carrier()
    before = marked_cpu_s(mark)
    num_bytes = sum(carrier() for _ in range(rounds))
    after = marked_cpu_s(mark)
    cpu_s = sum(after[process] - before.get(process, 0.0) for process in after)
    return Carried(cpu_s=cpu_s, num_bytes=num_bytes, num_groups=rounds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(CARRIERS))
    parser.add_argument("trajectory_mb", type=float)
    parser.add_argument("rounds", type=int)
    options = parser.parse_args()
    try:
        module = importlib.import_module(CARRIERS[options.name])
        opened: AbstractContextManager[Carrier] = module.carrier(options.name, NUM_TRAJECTORIES, options.trajectory_mb)
    except (ImportError, UnsupportedError) as error:
        print(json.dumps(asdict(Carried(missing=f"not installed: {error}"))))
        return
    with opened as carrier:
        result = measure(carrier, options.rounds, os.environ[MARK])
    print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
