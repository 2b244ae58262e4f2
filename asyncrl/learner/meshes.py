"""How ranks share one model: which train different rows, which compute the same rows together, and what shards which weights.

Ranks of one replica are neighbours. With W ranks:

    layout                 replicas           a replica's ranks       decoder layers sharded over   embedding and head over
    data parallel          W                  1                       all                           all
    HSDP, s ranks a copy   W                  1                       s, copied W / s times         s, copied W / s times
    Ulysses, p ranks       W / p              p slices of tokens      all                           all
    tensor, t ranks        W / t              t slices of layers      replicas, on top of t         all

Source: ZeRO and HSDP (arXiv:2304.11277), Ulysses (arXiv:2309.14509), tensor parallelism (arXiv:1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.config.layout import Layout

__all__ = ["Meshes", "meshes_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Meshes of one pool.

    Attributes:
        data: 1-D, one rank of each replica; replica: 1-D, the ranks of this replica, or None where it has one.
        layers: what decoder layers are sharded over (2-D for HSDP: copies, shards); root: what everything else is.
        shares: what a replica's ranks divide among them: nothing, tokens, or the matrices of each layer.
    """

    data: DeviceMesh
    replica: DeviceMesh | None
    layers: DeviceMesh
    root: DeviceMesh
    shares: Literal["nothing", "tokens", "matrices"]

    @property
    def layers_are_sharded(self) -> bool:
        """Whether a layer's weights lie on more than one rank, beyond what a replica divides."""
        return self.layers.size(-1) > 1

    @property
    def replica_ranks(self) -> int:
        """Ranks of one replica."""
        return 1 if self.replica is None else self.replica.size()

    @property
    def is_source(self) -> bool:
        """Whether this rank is the first of its replica."""
        return self.replica is None or self.replica.get_local_rank() == 0

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks of this replica; None where it is one rank."""
        return None if self.replica is None else self.replica.get_group()


def meshes_of(device_type: str, layout: Layout) -> Meshes:
    """The meshes of a layout that was checked, over all ranks of the process group; collective."""
    world, tensor, sequence = layout.ranks, layout.tensor_parallel, layout.sequence_parallel
    shards = layout.shard_ranks or world
    everyone = init_device_mesh(device_type, (world,), mesh_dim_names=("all",))
    if tensor > 1:
        grid = init_device_mesh(device_type, (world // tensor, tensor), mesh_dim_names=("replica", "tensor"))
        return Meshes(data=grid["replica"], replica=grid["tensor"], layers=grid["replica"], root=everyone, shares="matrices")
    if sequence > 1:
        grid = init_device_mesh(device_type, (world // sequence, sequence), mesh_dim_names=("replica", "sequence"))
        return Meshes(data=grid["replica"], replica=grid["sequence"], layers=everyone, root=everyone, shares="tokens")
    if shards < world:
        grid = init_device_mesh(device_type, (world // shards, shards), mesh_dim_names=("copy", "shard"))
        return Meshes(data=everyone, replica=None, layers=grid, root=grid, shares="nothing")
    return Meshes(data=everyone, replica=None, layers=everyone, root=everyone, shares="nothing")
