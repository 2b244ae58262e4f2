"""Processes that stay: they import torch and transformers once and then serve one order after the other.

An order goes to the first N of them; each opens a process group of its own for it, works, closes it, and answers with what
``work`` returned. A rank that raises or does not answer in time ends the pool: its processes are killed, the failure names the
order and carries what ranks said, and the next order starts new ones.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

__all__ = ["RankPool", "RanksFailed"]

START_S = 180.0
ORDER_S = 60.0
LEAVE_S = 10.0
MOST_THREADS = 40  # of a rank at rest
_MODELS = ("qwen2", "qwen3", "qwen3_moe", "llama")
_ENGINES = ("asyncrl.learner.fsdp2", "asyncrl.learner.megatron.engine")
_PRELOAD = [*(f"transformers.models.{model}.modeling_{model}" for model in _MODELS), "peft", *_ENGINES]


class RanksFailed(AssertionError):
    """An order ended without an answer of every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    work: Callable[[Any], Any]
    order: Any
    rank: int
    ranks: int
    collectives: str
    store: str
    deadline_s: float


class RankPool:
    """At most ``most_ranks`` processes.

    Args:
        most_ranks: ranks that an order may ask for; device: ``cpu`` or ``cuda``; collectives: backend of the process groups.
    """

    def __init__(self, *, most_ranks: int, device: str, collectives: str) -> None:
        self._most_ranks = most_ranks
        self._device = device
        self._collectives = collectives
        self._members: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="asyncrl-ranks-")
        self._orders = 0

    def run(self, name: str, ranks: int, work: Callable[[Any], Any], order: Any, deadline_s: float = ORDER_S) -> list[Any]:
        """``work(order)`` on ranks 0 to ``ranks - 1``; their answers in order.

        Raises:
            RanksFailed: a rank raised, died, or was silent for ``deadline_s``; says which, and ``name``.
        """
        self._start()
        self._orders += 1
        store = str(Path(self._folder.name) / f"order-{self._orders}")
        for rank, (_, connection) in enumerate(self._members[:ranks]):
            job = _Job(work=work, order=order, rank=rank, ranks=ranks, collectives=self._collectives, store=store, deadline_s=deadline_s)
            connection.send(job)
        answers = self._answers(name, ranks, deadline_s)
        if self._crowded():
            self.close()
        return answers

    def close(self, *, idle: bool = True) -> None:
        """Lets idle ranks go, and kills those that do not."""
        for _, connection in self._members:
            connection.close()
        until = monotonic() + (LEAVE_S if idle else 0.0)
        for process, _ in self._members:
            process.join(max(until - monotonic(), 0.0))
            process.kill()
            process.join()
        self._members = []

    def _crowded(self) -> bool:
        """Whether threads of closed groups are left in a rank, as gloo leaves some: they spin, and take the next order's time."""
        return any(len(os.listdir(f"/proc/{process.pid}/task")) > MOST_THREADS for process, _ in self._members)

    def _start(self) -> None:
        if self._members:
            return
        # a server that has imported everything forks ranks for nothing; what has seen CUDA cannot be forked
        context: Any = mp.get_context("spawn" if self._device == "cuda" else "forkserver")
        if self._device != "cuda":
            context.set_forkserver_preload(_PRELOAD)
        for _ in range(self._most_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._device), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self._answers("the start of the ranks", self._most_ranks, START_S)

    def _answers(self, name: str, ranks: int, deadline_s: float) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {self._members[rank][1]: rank for rank in range(ranks)}
        until = monotonic() + deadline_s
        while waiting and not failures:
            ready = wait(list(waiting), timeout=max(until - monotonic(), 0.0))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), f"silent for {deadline_s:g} s")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank], failure = connection.recv()
                except EOFError:
                    failure = "died"
                if failure:
                    failures[rank] = failure
        if failures:
            self.close(idle=False)
            said = "\n".join(f"rank {rank}: {failure}" for rank, failure in sorted(failures.items()))
            raise RanksFailed(f"{name} failed on {ranks} ranks\n{said}")
        return [answers[rank] for rank in range(ranks)]


def _serve(connection: Connection, device: str) -> None:
    import torch

    torch.set_num_threads(1)
    connection.send((None, ""))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        # a rank that hangs says on stderr where
        faulthandler.dump_traceback_later(max(job.deadline_s - 2.0, 1.0), exit=False)
        try:
            answer = _work(job, device), ""
        except Exception:  # noqa: BLE001 - whatever it is, the test that gave the order reports it
            answer = None, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)


def _work(job: _Job, device: str) -> Any:
    import torch

    if device == "cuda":
        torch.cuda.set_device(job.rank)
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.ranks), LOCAL_RANK=str(job.rank))
    torch.distributed.init_process_group(job.collectives, init_method=f"file://{job.store}", rank=job.rank, world_size=job.ranks)
    try:
        return job.work(job.order)
    finally:
        torch.distributed.destroy_process_group()
        _drop_groups()


def _drop_groups() -> None:
    """Each group of gloo has threads for as long as anybody holds it, and Megatron-core holds two dozen in its global state."""
    if state := sys.modules.get("megatron.core.parallel_state"):
        state.destroy_model_parallel()
    gc.collect()
