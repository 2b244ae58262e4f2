"""From the parameters of a loaded Hugging Face model to the names and shapes of its files: fused experts apart again, for example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["FileNames"]


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
