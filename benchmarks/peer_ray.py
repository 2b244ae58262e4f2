"""Ray's Queue as a carrier: one actor puts a group as a list of rows of arrays, another gets and sums it up.

Arrays travel outside the pickle through Ray's object store, which is the cheapest way that its Queue has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.queue import Queue

from asyncrl.errors import DataError
from benchmarks.cells import Carrier
from benchmarks.groups import make_group, token_bytes, token_sum

__all__ = ["NAMES", "carrier", "ray_head"]

NAMES = ("input_ids", "loss_mask", "behavior_logprobs")
_STORE_BYTES = 3 << 30


@contextmanager
def ray_head() -> Iterator[None]:
    """A head of its own, with room for groups of 64 trajectories of 8 MB."""
    ray.init(num_cpus=8, object_store_memory=_STORE_BYTES, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


class _Producer:
    def __init__(self, queue: Any, num_trajectories: int, trajectory_mb: float) -> None:
        self._queue = queue
        self._group = make_group(num_trajectories, trajectory_mb)

    def put(self) -> tuple[int, int]:
        rows = [{name: getattr(t, name) for name in NAMES} for t in self._group.trajectories]
        total = token_sum(row[name] for row in rows for name in NAMES)
        self._queue.put(rows)
        return token_bytes(self._group), total


class _Consumer:
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def get(self) -> int:
        rows = self._queue.get()
        return token_sum(row[name] for row in rows for name in NAMES)


@contextmanager
def carrier(name: str, num_trajectories: int, trajectory_mb: float) -> Iterator[Carrier]:
    """Carries through ``ray.util.queue.Queue``."""
    with ray_head():
        queue = Queue(maxsize=2, actor_options={"num_cpus": 0})
        producer = ray.remote(num_cpus=0)(_Producer).remote(queue, num_trajectories, trajectory_mb)
        consumer = ray.remote(num_cpus=0)(_Consumer).remote(queue)

        def carry() -> int:
            num_bytes, sent = ray.get(producer.put.remote())
            met = ray.get(consumer.get.remote())
            if met != sent:
                raise DataError(f"what arrived has the sum that was sent, {sent}; met {met}")
            return int(num_bytes)

        yield carry
