"""Which part of which tensor of a checkpoint a rank's parameter is, in the words of Megatron-core's dist_checkpointing.

Checkpoints know no layout: they hold whole tensors under the names that transformers gives a loaded model's parameters, which are those of
its files but for experts, all of which are one tensor there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.learner.megatron.names import Entry

__all__ = ["Shard", "compose", "decompose", "sharded", "shards_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """``name``: of the whole tensor; ``shape``: its; ``box``: this rank's part."""

    name: str
    shape: tuple[int, ...]
    box: tuple[slice, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(part.stop - part.start for part in self.box)


def shards_of(entry: Entry, rank: int) -> list[Shard]:
    """The parts that a tensor rank's parameter consists of, some of which may be empty."""
    if entry.expert is None:
        return [Shard(name=file.name, shape=file.shape, box=box) for file, box in zip(entry.files, entry.boxes(rank), strict=True)]
    stem, rest = entry.files[0].name.split(f".experts.{entry.expert}.")
    kind = "gate_up_proj" if rest.startswith("gate_proj") else "down_proj"
    sizes = entry.shape
    return [
        Shard(
            name=f"{stem}.experts.{kind}",
            shape=(entry.experts, *sizes),
            box=(slice(entry.expert, entry.expert + 1), *(slice(0, size) for size in sizes)),
        )
    ]


def decompose(entry: Entry, parameter: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """A parameter, or what has its shape, as the parts of :func:`shards_of`."""
    return entry.unmixed(parameter, rank) if entry.expert is None else [parameter[None]]


def compose(entry: Entry, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inverse of :func:`decompose`."""
    return entry.mixed(parts) if entry.expert is None else parts[0][0]


def sharded(key: str, parts: Sequence[tuple[Shard, torch.Tensor]]) -> Any:
    """What torch's DCP takes for a rank's parts of one whole tensor."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer

    described = [
        ShardedTensor(
            key=key,
            data=tensor,
            dtype=tensor.dtype,
            local_shape=shard.sizes,
            global_shape=shard.shape,
            global_offset=tuple(part.start for part in shard.box),
            axis_fragmentations=None,  # parts may be of different sizes
        )
        for shard, tensor in parts
    ]
    return LocalShardsContainer([CheckpointableShardedTensor.from_sh_ten(one) for one in described])
