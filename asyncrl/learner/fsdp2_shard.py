"""Puts FSDP2 on a packed model: a unit for each decoder layer, and the whole as the root of what is left."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asyncrl.learner.meshes import Meshes
from asyncrl.learner.packed import PackedModel

__all__ = ["shard"]


def shard(packed: PackedModel, layers: list[torch.nn.Module], meshes: Meshes, dtype: torch.dtype, *, offload: bool) -> list[FSDPModule]:
    """Shards in place; returns the units. Gradients are summed over ranks, in float32 whatever the precision of the pass.

    A single rank that computes in the precision of its weights has nothing to shard, gather, cast or move: there are no units then, since
    their copies of every weight and gradient would cost a third of a small model's step.
    """
    if meshes.root.size() == 1 and dtype == torch.float32 and not offload:
        return []
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    where = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    for layer in layers:
        reshard = meshes.layers_are_sharded
        fully_shard(layer, mesh=meshes.layers, mp_policy=policy, offload_policy=where, reshard_after_forward=reshard)
    fully_shard(packed, mesh=meshes.root, mp_policy=policy, offload_policy=where, reshard_after_forward=False)
    units: list[FSDPModule] = [module for module in packed.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return units
