"""What the distributed optimizer keeps of one parameter, whole: its float32 weight and Adam's moments.

Each of the ranks that hold a parameter keeps a stretch of it, which a parameter's neighbours in a buffer decide; nothing outside has to
know which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MOMENTS", "Masters"]

MOMENTS = ("exp_avg", "exp_avg_sq")


class Masters:
    """Whole tensors in and out of an optimizer.

    Args:
        optimizer: of :func:`~asyncrl.learner.megatron.updates.new_optimizer`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizers = optimizer.chained_optimizers

    def gather(self, parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
        """``weight`` or one of :data:`MOMENTS`, float32 of the parameter's shape, on every rank that holds it; collective over those.

        Before the first step moments are zero.
        """
        optimizer, whole = self._owner(parameter), torch.zeros(parameter.numel(), device=parameter.device)
        own = self._own(optimizer, parameter)
        if own is not None:
            stretch, master = own
            part = master.detach() if kind == "weight" else optimizer.optimizer.state.get(master, {}).get(kind)
            if part is not None:
                whole[stretch] = part
        dist.all_reduce(whole, group=optimizer.data_parallel_group)
        return whole.view(parameter.shape)

    @torch.no_grad()
    def start(self, parameter: torch.nn.Parameter, weight: torch.Tensor) -> None:
        """Takes float32 weights of which the parameter itself holds fewer bits."""
        own = self._own(self._owner(parameter), parameter)
        if own is not None:
            stretch, master = own
            master.copy_(weight.flatten()[stretch])

    @torch.no_grad()
    def set(self, parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Takes what :meth:`gather` gave of each kind, and the optimizer steps that it has seen, on every rank that holds the parameter."""
        parameter.copy_(tensors["weight"])
        self.start(parameter, tensors["weight"])
        optimizer = self._owner(parameter)
        own = self._own(optimizer, parameter)
        if own is None:
            return
        stretch, master = own
        state = optimizer.optimizer.state[master]
        state["step"] = torch.tensor(float(steps))
        for name in MOMENTS:
            state[name] = tensors[name].flatten()[stretch].to(master.device, torch.float32, copy=True)

    def _owner(self, parameter: torch.nn.Parameter) -> Any:
        """Experts have an optimizer of their own, which is the last."""
        return self._optimizers[0 if getattr(parameter, "allreduce", True) else -1]

    def _own(self, optimizer: Any, parameter: torch.nn.Parameter) -> tuple[slice, torch.Tensor] | None:
        """This rank's stretch of the flat parameter and its float32 weights; None where others keep all of it."""
        place = optimizer.model_param_group_index_map.get(parameter)
        if place is None:
            return None
        group, order = place
        stretch = optimizer._get_model_param_range_map(parameter)["param"]
        return slice(stretch.start, stretch.end), optimizer.optimizer.param_groups[group]["params"][order]
