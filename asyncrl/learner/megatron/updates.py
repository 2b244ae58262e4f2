"""The distributed optimizer of Megatron with the arithmetic of :mod:`asyncrl.learner.optimizer`.

Gradients and optimizer state are sharded over the replicas (and over context-parallel ranks); every weight decays alike, clipping
takes the norm over all weights, each counted once, and a norm that is not finite changes nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from asyncrl.config import LearnerConfig
from asyncrl.learner.megatron.schedule import sum_gradients
from asyncrl.learner.megatron.standins import import_megatron
from asyncrl.learner.optimizer import learning_rate

import_megatron()

import megatron.core.optimizer  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

__all__ = ["clip_and_step", "new_optimizer", "replicated"]

# those of Transformer Engine and Apex, which it takes where they are installed, keep their steps where no checkpoint looks
megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True


def replicated(chunks: list[Any]) -> list[Any]:
    """The chunks with float32 buffers for their gradients, which are summed over replicas when a schedule ends; collective."""
    buffers = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": False, "use_distributed_optimizer": True}
    wrapped = [DistributedDataParallel(c.config, DistributedDataParallelConfig(**buffers), c, disable_bucketing=True) for c in chunks]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = sum_gradients
    return wrapped


def new_optimizer(chunks: list[Any], settings: LearnerConfig, dtype: torch.dtype) -> Any:
    """AdamW over what :func:`replicated` gave, whose weights are of ``dtype``; collective."""
    options = OptimizerConfig(
        optimizer="adam",
        lr=learning_rate(0, settings),
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    # no overrides: with those that Megatron-core has of its own, norms would not decay
    return get_megatron_optimizer(options, chunks, config_overrides={}, use_gloo_process_groups=False)


def clip_and_step(optimizer: Any, max_norm: float) -> tuple[float, bool]:
    """Scales the gradients to at most ``max_norm`` and steps; (norm before, stepped). Collective."""
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm, False
    coefficient = min(max_norm / (norm + 1e-6), 1.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(coefficient)
    optimizer.step_with_ready_grads()
    return norm, True
