"""A Hugging Face decoder with a value head: what return is expected before each sampled token.

The value of token t is read where token t is predicted, from the tokens before it. On disk the head is that of a token classifier
with one label (``score``).
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.packed import PackedModel

__all__ = ["Valuer"]


class Valuer(PackedModel):
    """Packed tokens → values of the sampled ones."""

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Values, float32 [K], and the router's loss."""
        decoded = self.decode(micro)
        head: Any = self.model.score
        return self.collect(head(decoded.hidden).float().sum(-1), decoded, micro), decoded.router

    def predict(self, micro: MicroBatch) -> torch.Tensor:
        """Values, float32 [K]."""
        values: torch.Tensor = self(micro)[0]
        return values

    @staticmethod
    def alone(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See :class:`PackedModel`."""
        return logits[:, 0]
