"""The loss of a value model on sampled tokens.

Source: PPO (arXiv:1707.06347, eq. 9), the squared error of the value function.
"""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses import Denominators, LossOutput

__all__ = ["VALUE_STATISTICS", "value_loss"]

VALUE_STATISTICS = ("tokens", "loss", "error_square", "returns", "returns_square")
"""Names of the float64 sums of :func:`value_loss`, in order; 1 − error_square / variance of returns is the share explained."""


def value_loss(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, denominators: Denominators) -> LossOutput:
    """½ Σ mask · (values − returns)² / tokens; every argument but the last is float32 [K].

    Example:
        >>> one = torch.ones(1)
        >>> value_loss(3 * one, one, one, Denominators(tokens=2, trajectories=1)).loss.item()  # ½ · 2² / 2
        1.0
    """
    error = torch.where(mask > 0, values - returns, torch.zeros_like(values))  # what does not count may be anything
    loss = 0.5 * (error * error).sum() / max(denominators.tokens, 1)
    with torch.no_grad():
        kept = torch.where(mask > 0, returns, torch.zeros_like(returns)).double()
        square = error.double() ** 2
        sums = torch.stack([mask.double().sum(), loss.double(), square.sum(), kept.sum(), (kept**2).sum()])
    return LossOutput(loss=loss, sums=sums)
