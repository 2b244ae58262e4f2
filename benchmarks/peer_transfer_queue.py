"""TransferQueue as a carrier, with its own in-memory storage over ZeroMQ: rows of a group are put and got by key, then cleared.

Trajectories of the bench are of one length, so that they travel as plain [N, T] tensors, its cheapest way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from asyncrl.errors import DataError
from benchmarks.cells import Carrier
from benchmarks.groups import make_group, token_bytes, token_sum
from benchmarks.peer_ray import NAMES, ray_head

__all__ = ["carrier"]

_PARTITION = "train"


class _Client:
    """One process that is connected to the queue."""

    def __init__(self, num_trajectories: int, trajectory_mb: float) -> None:
        transfer_queue.init()
        self._keys = [f"k{i}" for i in range(num_trajectories)]
        group = make_group(num_trajectories, trajectory_mb)
        self._num_bytes = token_bytes(group)
        tensors = {name: torch.stack([torch.from_numpy(getattr(t, name).copy()) for t in group.trajectories]) for name in NAMES}
        self._fields = TensorDict(tensors, batch_size=num_trajectories)

    def put(self) -> tuple[int, int]:
        total = token_sum(self._fields[name][i].numpy() for i in range(len(self._keys)) for name in NAMES)
        transfer_queue.kv_batch_put(keys=self._keys, partition_id=_PARTITION, fields=self._fields)
        return self._num_bytes, total

    def get(self) -> int:
        fields = transfer_queue.kv_batch_get(keys=self._keys, partition_id=_PARTITION)
        total = token_sum(fields[name][i].numpy() for i in range(len(self._keys)) for name in NAMES)
        transfer_queue.kv_clear(keys=self._keys, partition_id=_PARTITION)
        return total


@contextmanager
def carrier(name: str, num_trajectories: int, trajectory_mb: float) -> Iterator[Carrier]:
    """Carries through ``kv_batch_put`` and ``kv_batch_get``."""
    with ray_head():
        transfer_queue.init()
        producer = ray.remote(num_cpus=0)(_Client).remote(num_trajectories, trajectory_mb)
        consumer = ray.remote(num_cpus=0)(_Client).remote(num_trajectories, trajectory_mb)

        def carry() -> int:
            num_bytes, sent = ray.get(producer.put.remote())
            met = ray.get(consumer.get.remote())
            if met != sent:
                raise DataError(f"what arrived has the sum that was sent, {sent}; met {met}")
            return int(num_bytes)

        try:
            yield carry
        finally:
            transfer_queue.close()
