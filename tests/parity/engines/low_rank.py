"""LoRA in the plain process, without ``peft``: W + scale · B A in place of W, B zero at the start, W frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize

__all__ = ["adapt", "merge"]


class _LowRank(torch.nn.Module):
    def __init__(self, a: np.ndarray, rows: int, scale: float) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.from_numpy(a.copy()))
        self.b = torch.nn.Parameter(torch.zeros(rows, len(a)))
        self.scale = scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * (self.b @ self.a)


def adapt(model: Any, adapters: Mapping[str, np.ndarray], scale: float) -> None:
    """Adapts every linear layer of the decoder; ``adapters`` has A [rank, columns] by the name of each one's weight, and no other."""
    linear = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    assert linear.keys() == adapters.keys(), sorted(linear.keys() ^ adapters.keys())
    model.requires_grad_(False)
    for name, module in linear.items():
        parametrize.register_parametrization(module, "weight", _LowRank(adapters[name], len(module.weight), scale))
        module.parametrizations.weight.original.requires_grad_(False)


def merge(model: Any) -> None:
    """Leaves weights that do alone what they did with their adapters."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
