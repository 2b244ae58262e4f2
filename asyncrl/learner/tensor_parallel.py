"""Tensor parallelism by the plan that a Hugging Face model declares for itself.

Matrices of a layer are divided over the ranks of a replica; whatever stands between them is computed by each. Embedding and head
are not divided: each rank computes them for its own slice of the tokens, and their weights are sharded over all ranks.

Source: Megatron-LM (arXiv:1909.08053); ``base_model_tp_plan`` of the model's configuration.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from asyncrl.errors import UnsupportedError

__all__ = ["use_tensor_parallel"]

_PARTIAL = "replicated_with_grad_allreduce"


def use_tensor_parallel(model: Any, layers: list[torch.nn.Module], mesh: DeviceMesh) -> list[torch.nn.Module]:
    """Divides the matrices of every layer over a mesh, whose size divides the heads.

    Returns:
        Modules whose weights every rank holds whole while their gradient is a part of the sum over the mesh.

    Raises:
        UnsupportedError: the model declares no plan, or its plan needs something else than whole columns and rows.
    """
    decoder = model.get_decoder()
    plan = {name: style for name, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items() if name.startswith("layers.")}
    if not plan:
        raise UnsupportedError(
            f"learner.tensor_parallel = {mesh.size()} goes by a model's base_model_tp_plan; {type(model).__name__} has none"
        )
    partial: list[torch.nn.Module] = []
    styles: dict[str, dict[str, ParallelStyle]] = {}
    for name, module in [*decoder.named_modules(), *decoder.named_parameters()]:
        style = next((style for pattern, style in plan.items() if _matches(pattern, name)), None)
        if style is None:
            continue
        _, number, inner = name.split(".", 2)
        if style == _PARTIAL:
            partial.append(module)
        elif style in ("colwise", "rowwise"):
            styles.setdefault(number, {})[inner] = ColwiseParallel() if style == "colwise" else RowwiseParallel()
        else:
            raise UnsupportedError(
                f"learner.tensor_parallel divides columns and rows; {type(model).__name__} wants {style!r} for {name}: use "
                f"learner.sequence_parallel, or data parallel alone"
            )
    for number, layer in enumerate(layers):
        parallelize_module(layer, mesh, styles.get(str(number), {}))
    return partial


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
