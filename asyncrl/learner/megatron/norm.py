"""The root-mean-square norm of the Hugging Face families: statistics in float32, rounded before the weight is applied."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """Takes activations that are cut by position, which Megatron-core's own norm without Transformer Engine refuses.

    Args:
        config: Megatron-core's; hidden_size: width of what is normalised; eps: added to the mean square.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        weight: Any = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        # each tensor rank sees some positions: Megatron-core sums such gradients over them
        weight.sequence_parallel = config.sequence_parallel
        self.weight: nn.Parameter = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [..., H]; the same shape and precision."""
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)
