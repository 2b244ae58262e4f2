"""What learner ranks say to each other besides tensors: a small broadcast and small reductions, over gloo.

One rank leads: it leases, publishes and reports. It speaks at least once a second while it waits for a batch, so no rank ever stays
longer in a call than that, and each of them notices SIGTERM. With one rank nothing is sent.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import EngineError, ProcessDied

__all__ = ["Control", "broadcast_bytes"]


def broadcast_bytes(message: bytes, source: int, group: dist.ProcessGroup | None) -> memoryview:
    """Read-only bytes of global rank ``source`` on every rank of a gloo group; the others' argument is ignored.

    Raises:
        RuntimeError: another rank is gone or silent.
    """
    mine = dist.get_rank() == source
    size = torch.tensor([len(message)])
    dist.broadcast(size, src=source, group=group)
    if not size.item():
        return memoryview(b"")
    body = torch.frombuffer(bytearray(message), dtype=torch.uint8) if mine else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(body, src=source, group=group)
    return memoryview(message) if mine else body.numpy().data.toreadonly()


class Control:
    """Agreement among the ranks of one pool; rank 0 leads until they elect another.

    Args:
        rank, world_size: of this process; timeout_s: how long a rank waits for a silent peer before it gives up.

    Raises (each method):
        ProcessDied: another rank is gone or silent.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.leader = 0
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if world_size > 1 else None

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads."""
        return self.rank == self.leader

    def elect(self, candidate: bool) -> None:
        """The lowest rank that is a candidate leads from now on; collective.

        Raises:
            EngineError: no rank is one.
        """
        found = self._reduce(self.rank if candidate else self.world_size, dist.ReduceOp.MIN)
        if found == self.world_size:
            raise EngineError(f"a source leads the ranks of a learner; none of {self.world_size} says is_mp_source")
        self.leader = found

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return bool(self._reduce(int(flag), dist.ReduceOp.MAX))

    def total(self, count: int) -> int:
        """Sum over ranks."""
        return self._reduce(count, dist.ReduceOp.SUM)

    def barrier(self) -> None:
        """Returns on every rank after all have come here."""
        self._reduce(0, dist.ReduceOp.MAX)

    def broadcast(self, message: bytes) -> bytes:
        """The leader's message on every rank; the others' argument is ignored."""
        if self.world_size == 1:
            return message
        try:
            return bytes(broadcast_bytes(message, self.leader, self._group))
        except RuntimeError as error:
            raise self._gone(error) from error

    def _reduce(self, value: int, how: Any) -> int:
        if self.world_size == 1:
            return value
        cell = torch.tensor([value])
        try:
            dist.all_reduce(cell, op=how, group=self._group)
        except RuntimeError as error:
            raise self._gone(error) from error
        return int(cell.item())

    def _gone(self, error: RuntimeError) -> ProcessDied:
        return ProcessDied(f"a learner rank is gone, seen by learner-{self.rank} of {self.world_size}: {error}", process="learner")
