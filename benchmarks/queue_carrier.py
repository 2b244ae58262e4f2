"""The queue itself as a carrier: a real broker, a producer and a consumer, each a process, on one host.

``shm``, ``ipc`` and ``tcp`` keep nothing on disk; over the last two the consumer takes payload from the producer itself, and
``ipc_relayed`` and ``tcp_relayed`` send it through the broker. ``ipc_synced`` sends it to the broker, which appends it to the log and waits
for the disk before it acknowledges; the consumer reads the log's files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import DataError
from asyncrl.launch.start import free_port
from asyncrl.queue.heap import streaming_copies
from asyncrl.queue.shm import SegmentKeeper
from benchmarks.cells import Carrier

__all__ = ["OPTIONS", "broker", "carrier", "new_run"]

OPTIONS: dict[str, dict[str, Any]] = {
    "shm": {"payload": "shm", "durability": "memory"},
    "ipc": {"payload": "direct", "durability": "memory"},
    "tcp": {"payload": "direct", "durability": "memory", "transport": "tcp"},
    "ipc_synced": {"payload": "inline", "durability": "synced"},
    "ipc_relayed": {"payload": "inline", "durability": "memory"},
    "tcp_relayed": {"payload": "inline", "durability": "memory", "transport": "tcp"},
}
"""Options of the queue by cell."""

STEP_BYTES = 256_000_000
MAX_GROUPS = 4


def new_run(folder: Path, groups_per_step: int, options: Mapping[str, Any]) -> RunDir:
    """A run directory for one broker; ``options`` of the queue."""
    run_dir = RunDir(folder)
    queue = {"max_queued_mib": 4096, "max_message_mib": 1024, "max_staleness": 1024, "dead_after_s": 60.0, **options}
    run_dir.write_config(Config.model_validate({"algorithm": {"groups_per_step": groups_per_step}, "queue": queue}))
    tcp = options.get("transport") == "tcp"
    run_dir.write_facts(
        RunFacts(
            run_id=f"b{uuid.uuid4().hex[:8]}",
            incarnation=0,
            queue_endpoints=(f"tcp://127.0.0.1:{free_port()}" if tcp else f"ipc://{folder}/q",),
            sync_endpoint=f"ipc://{folder}/s",
            rendezvous="",
            model_dir="",
            generator_device="cpu",
            learner_device="cpu",
        )
    )
    return run_dir


@contextmanager
def broker(run_dir: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """A broker process; ended in order, its shared memory swept."""
    with run_dir.path.joinpath("queue.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "asyncrl.queue", str(run_dir.path)], stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=30)
            SegmentKeeper(run_dir.read_facts().run_id).sweep(())


class End:
    """A process of :mod:`benchmarks.queue_ends`."""

    def __init__(self, role: str, run_dir: RunDir, trajectory_mb: float) -> None:
        command = [sys.executable, "-m", "benchmarks.queue_ends", role, str(run_dir.path), str(trajectory_mb)]
        environment = {**os.environ, **(streaming_copies() if role == "producer" else {})}  # as the launcher starts generators
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self._role = role

    def tell(self) -> None:
        """Begins a step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """The line that ends it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise DataError(f"the {self._role} of the cell ended with exit code {self._process.wait(timeout=10)}")
        return line

    def close(self) -> None:
        """Its input ends, so does it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)


@contextmanager
def carrier(name: str, num_trajectories: int, trajectory_mb: float) -> Iterator[Carrier]:
    """Carries a step of one or more groups, about 256 MB."""
    groups_per_step = max(1, min(MAX_GROUPS, int(STEP_BYTES / (num_trajectories * trajectory_mb * 1e6))))
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-bench-"))
    try:
        run_dir = new_run(folder, groups_per_step, OPTIONS[name])
        with broker(run_dir):
            ends = [End(role, run_dir, trajectory_mb) for role in ("producer", "consumer")]
            try:
                for end in ends:
                    end.hear()

                def carry() -> int:
                    for end in ends:
                        end.tell()
                    sent, received = (int(end.hear()) for end in ends)
                    if received < sent:
                        raise DataError(f"all of {sent} bytes arrive; met {received}")
                    return sent

                yield carry
                time.sleep(0.1)  # the last commit is answered
            finally:
                for end in ends:
                    end.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
