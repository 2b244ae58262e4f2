"""What the ranks of one data-parallel replica share: the rows that its source fetched, and the log-probs that it computed.

Ranks under tensor, sequence or pipeline parallelism train the same rows, and each of them needs those whole. Only the source asks the
queue for them, so that payload leaves the queue once a replica; it hands on the Arrow frames, over gloo, beside the engine's own
traffic. A source that fails says so before it raises: nobody waits for rows that never come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from asyncrl.errors import EngineError, ProcessDied
from asyncrl.learner.control import broadcast_bytes
from asyncrl.learner.engine import Engine
from asyncrl.trajectory import TrajectoryGroup, decode_group, encode_group_frames

__all__ = ["Fetched", "Replica"]

Fetched = tuple[dict[int, TrajectoryGroup], list[tuple[int, int, str]]]


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """What follows: (ticket, bytes) of each group's stream, or why nothing does."""

    sizes: tuple[tuple[int, int], ...] = ()
    damaged: tuple[tuple[int, int, str], ...] = ()
    failure: str = ""


class Replica:
    """This rank among those that train the same rows; an engine without model parallelism is alone in its replica.

    Args:
        engine: initialized; all ranks of the learner make this together.
        timeout_s: how long a rank waits for a silent source before it gives up.

    Raises:
        EngineError: the replica has no source, or several.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self.is_source = engine.is_mp_source
        self._group: dist.ProcessGroup | None = None
        self._source = self._rank = 0
        if engine.model_parallel_group is None:
            if not self.is_source:
                raise EngineError("a rank that is a replica by itself is its source; met is_mp_source = False")
            return
        ranks = dist.get_process_group_ranks(engine.model_parallel_group)
        self._rank = dist.get_rank()
        # a group of its own: the engine's may have no side for CPU tensors, and waits far longer for a peer that is gone
        for replica in _replicas(ranks):
            group = dist.new_group(replica, timeout=timedelta(seconds=timeout_s), backend="gloo")
            self._group = group if replica == ranks else self._group
        flags = [torch.zeros(1, dtype=torch.int64) for _ in ranks]
        dist.all_gather(flags, torch.tensor([int(self.is_source)]), group=self._group)
        sources = [rank for rank, flag in zip(ranks, flags, strict=True) if flag.item()]
        if len(sources) != 1:
            raise EngineError(f"one rank of a replica is its source; met {sources} among {ranks}")
        self._source = sources[0]

    def groups(self, fetch: Callable[[], Fetched]) -> Fetched:
        """What ``fetch`` gives on the source, on every rank of the replica: groups by ticket, and those that cannot be used.

        Raises:
            ProcessDied: the source failed, named with its error, or is gone. On the source: what ``fetch`` raised.
        """
        if self._group is None:
            return fetch()
        if not self.is_source:
            return self._receive()
        try:
            found, damaged = fetch()
            streams = {ticket: encode_group_frames(group) for ticket, group in found.items()}
        except Exception as error:  # whatever it was, the others of the replica wait for it; it is raised here all the same
            self._broadcast(msgspec.msgpack.encode(_Header(failure=f"{type(error).__name__}: {error}")))
            raise
        sizes = tuple((ticket, sum(memoryview(frame).nbytes for frame in frames)) for ticket, frames in streams.items())
        self._broadcast(msgspec.msgpack.encode(_Header(sizes=sizes, damaged=tuple(damaged))))
        self._broadcast(b"".join(itertools.chain.from_iterable(streams.values())))
        return found, damaged

    def logprobs(self, logprobs_N: Sequence[np.ndarray], lengths_N: Sequence[int]) -> tuple[np.ndarray, ...]:
        """The source's float32 [T] arrays, of ``lengths_N`` entries, on every rank of the replica; elsewhere the argument is ignored.

        Shared and not computed on each rank: a pipeline has them on its last stage alone, and ranks that train one row must see
        the same bits.
        """
        if self._group is None or not lengths_N:
            return tuple(logprobs_N)
        flat = np.concatenate(logprobs_N) if self.is_source else np.empty(sum(lengths_N), np.float32)
        try:
            dist.broadcast(torch.from_numpy(flat), src=self._source, group=self._group)
        except RuntimeError as error:
            raise self._gone(error) from error
        return tuple(np.split(flat, np.cumsum(lengths_N)[:-1]))

    def _receive(self) -> Fetched:
        header = msgspec.msgpack.decode(self._broadcast(b""), type=_Header)
        if header.failure:
            raise ProcessDied(f"learner-{self._source} fetches for learner-{self._rank} and failed: {header.failure}", process="learner")
        body = self._broadcast(b"")
        bounds = itertools.pairwise(itertools.accumulate((size for _, size in header.sizes), initial=0))
        groups = {ticket: decode_group(body[low:high]) for (ticket, _), (low, high) in zip(header.sizes, bounds, strict=True)}
        return groups, list(header.damaged)

    def _broadcast(self, message: bytes) -> memoryview:
        try:
            return broadcast_bytes(message, self._source, self._group)
        except RuntimeError as error:
            raise self._gone(error) from error

    def _gone(self, error: RuntimeError) -> ProcessDied:
        return ProcessDied(f"a rank of the replica of learner-{self._rank} is gone: {error}", process="learner")


def _replicas(ranks: list[int]) -> list[list[int]]:
    """The ranks of every replica, in one order on all ranks of the learner, of which each gives those of its own.

    torch names a group that only its members make after the number of groups that a member knows, which stages of a pipeline differ in.
    """
    mine = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    mine[ranks] = 1
    members = [torch.empty_like(mine) for _ in mine]
    dist.all_gather(members, mine)
    found = [row.nonzero()[:, 0].tolist() for row in members]
    return [replica for rank, replica in enumerate(found) if rank == replica[0]]
