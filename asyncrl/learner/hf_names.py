"""From the parameters of a loaded Hugging Face model to the names and shapes of its files: fused experts apart again, for example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from asyncrl.learner.adapters import ADAPTED, base_name, is_adapter, low_rank_of, merged

__all__ = ["FileNames", "file_tensors"]


class FileNames:
    """What a model's files call its parameters.

    Args:
        model: as transformers loaded it.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._model = model
        self._differs = bool(getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False))

    def of(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """One parameter as its tensors on disk."""
        if not self._differs:
            yield name, tensor
            return
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(self._model, {name: tensor}).items()


def file_tensors(
    parameters: Mapping[str, torch.Tensor],
    files: FileNames,
    *,
    scale: float,
    dtype: torch.dtype,
    whole: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's parameters as its files have them, in ``dtype``; adapters are merged, in the precision of the parameters.

    Args:
        scale: of the adapters, alpha / rank; whole: gathers a parameter that is sharded.
    """
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        full = whole(parameter)
        if name.endswith(ADAPTED):
            full = merged(name, full, {part: whole(parameters[part]) for part in low_rank_of(name)}, scale)
        for file_name, tensor in files.of(base_name(name), full.to(dtype)):
            yield file_name, tensor.contiguous()
