"""AdamW with linear warm-up, and gradient clipping over sharded tensors.

On one rank every operation is the one that a plain process runs on plain tensors, in the same order: results agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from asyncrl.config import LearnerConfig

__all__ = ["clip_gradients", "learning_rate", "local", "new_optimizer"]


def new_optimizer(parameters: Iterable[torch.nn.Parameter], settings: LearnerConfig) -> torch.optim.AdamW:
    """Fused AdamW; fused does on one core in one pass what the plain loop does in twelve."""
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate(0, settings),
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def learning_rate(optimizer_steps: int, settings: LearnerConfig) -> float:
    """Rate of the next optimizer step after ``optimizer_steps``: linear up to ``learning_rate`` over ``warmup_steps``, then constant.

    Example:
        >>> learning_rate(0, LearnerConfig(learning_rate=1.0, warmup_steps=4))
        0.25
    """
    if settings.warmup_steps == 0:
        return settings.learning_rate
    return settings.learning_rate * min(1.0, (optimizer_steps + 1) / settings.warmup_steps)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float, group: dist.ProcessGroup, num_shards: int) -> float:
    """Scales gradients that are sharded over ``group`` to at most ``max_norm``; the norm before, which may not be finite.

    Nothing is scaled when the norm is not finite.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    total = torch.nn.utils.get_total_norm([g for g in gradients if g.numel()], 2.0)
    if num_shards > 1:
        square = total.to(gradients[0].device).double() ** 2
        dist.all_reduce(square, group=group)
        total = square.sqrt().float()
    norm = float(total)
    if math.isfinite(norm):
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(coefficient)
    return norm
