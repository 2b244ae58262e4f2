"""Attention inside Megatron's layers that sees what a pack allows, and nothing else.

Megatron's own takes one causal sequence, or sequences side by side; a pack has prompts that several rows share. Under context
parallelism each rank holds queries, keys and values of one stretch of the pack; keys and values are gathered over the group, and what
flows back to them is summed over its ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from asyncrl.learner.megatron.standins import import_megatron

import_megatron()

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402

__all__ = ["PackedAttention"]


class PackedAttention(torch.nn.Module):
    """Core attention of a layer's specification.

    Args:
        softmax_scale: None for 1/√D; pg_collection: Megatron's groups of this rank; whatever else a specification hands on has no effect
        here.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.softmax_scale = softmax_scale
        self._context = pg_collection.cp

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor, **_: Any) -> torch.Tensor:
        """[n, 1, heads · D] of queries [n, 1, heads, D] and keys and values [n, 1, pairs, D].

        ``sees``: bool [1, 1, n, L], True where a token of this rank sees one of the pack.
        """
        if self._context.size() > 1:
            both = gather_from_sequence_parallel_region(torch.stack((key, value), 1), group=self._context)
            key, value = both.unbind(1)
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        # pairs are copied: of the kernels that share them, the one that takes a mask keeps all scores
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)
