"""Router logits of a mixture of experts, collected while a micro-batch runs: the load-balancing loss is ours, not Megatron's."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RouterLogits"]


class RouterLogits:
    """What the routers of some chunks said in passes with gradients since the last :meth:`take`.

    Args:
        chunks: their decoder layers are listened to where they have a router.
    """

    def __init__(self, chunks: list[Any]) -> None:
        self._logits: list[torch.Tensor] = []
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                router = getattr(layer.mlp, "router", None)
                if router is not None:
                    router.gating = self._heard(router.gating)

    def take(self) -> list[torch.Tensor]:
        """One [n, E] a layer, and forgets them."""
        logits, self._logits = self._logits, []
        return logits

    def _heard(self, gating: Any) -> Any:
        def gate(tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = gating(tokens)
            if torch.is_grad_enabled():  # nobody takes what a scoring pass leaves
                self._logits.append(logits.flatten(0, -2))
            return logits

        return gate
