"""Ulysses sequence parallelism inside a Hugging Face model: each rank holds a slice of the tokens, and of the heads in attention.

Before attention two all-to-alls turn [all heads, own tokens] into [own heads, all tokens], after it one turns it back. The mask is
that of the whole pack. Key and value heads fewer than ranks are repeated until each rank has one.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from asyncrl.errors import UnsupportedError
from asyncrl.learner.slices import Slices, applied

__all__ = ["ATTENTION", "use_ulysses"]

ATTENTION = "asyncrl_ulysses"
_GROUP = "asyncrl_sequence_group"
_UNDERSTOOD = {
    "dropout",
    "is_causal",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "past_key_values",
    "output_attentions",
    "output_router_logits",
}


def use_ulysses(model: Any, group: dist.ProcessGroup) -> None:
    """Makes every attention module of a model compute over the slices of a group, whose size divides the heads.

    Raises:
        UnsupportedError: the model has no module that is named attention.
    """
    from transformers import AttentionInterface

    modules = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    if not modules:
        raise UnsupportedError(f"learner.sequence_parallel divides attention modules; {type(model).__name__} has none of that name")
    AttentionInterface.register(ATTENTION, _attention)
    for module in modules:
        setattr(module, _GROUP, group)
    model.set_attn_implementation(ATTENTION)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, n, D] of queries, [1, key heads, n, D] of keys and values → [1, n, heads, D]; the mask is [1, 1, L, L]."""
    unknown = sorted(name for name, met in others.items() if met is not None and name not in _UNDERSTOOD)
    if unknown:
        raise UnsupportedError(f"attention of {type(module).__name__} under learner.sequence_parallel is plain; met {', '.join(unknown)}")
    group = getattr(module, _GROUP)
    slices, ranks = Slices.of(attention_mask.shape[-1], group), dist.get_world_size(group)
    repeat = max(1, ranks // key.shape[1])
    q, k, v = (_to_heads(part, slices) for part in (query, *(t.repeat_interleave(repeat, 1) for t in (key, value))))
    together = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(together, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=scaling)
    return _to_tokens(out, slices).transpose(1, 2).contiguous(), None


def _to_heads(own_tokens: torch.Tensor, slices: Slices) -> torch.Tensor:
    """[1, heads, n, D] → [1, heads / ranks, L, D]."""
    ranks = len(slices.sizes)
    _, heads, _, size = own_tokens.shape
    # [ranks · n, heads / ranks, D], what goes to one rank standing together
    sent = own_tokens[0].reshape(ranks, heads // ranks, -1, size).transpose(1, 2).flatten(0, 1)
    own = slices.sizes[slices.rank]
    met = _exchange(sent, [own] * ranks, list(slices.sizes), slices.group)
    return met.transpose(0, 1)[None].reshape(1, heads // ranks, sum(slices.sizes), size)


def _to_tokens(own_heads: torch.Tensor, slices: Slices) -> torch.Tensor:
    """[1, heads / ranks, L, D] → [1, heads, n, D]."""
    ranks, own = len(slices.sizes), slices.sizes[slices.rank]
    met = _exchange(own_heads[0].transpose(0, 1), list(slices.sizes), [own] * ranks, slices.group)
    return met.reshape(ranks, own, *met.shape[1:]).transpose(1, 2).flatten(0, 1)[None]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sizes, ctx.group = (out_sizes, in_sizes), group
        met = sent.new_empty((sum(in_sizes), *sent.shape[1:]))
        dist.all_to_all_single(met, sent.contiguous(), in_sizes, out_sizes, group=group)
        return met

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        out_sizes, in_sizes = ctx.sizes
        return applied(_Exchange, gradients[0], in_sizes, out_sizes, ctx.group), None, None, None


def _exchange(sent: torch.Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows to every rank, ``out_sizes`` of them each, and ``in_sizes`` back from each."""
    return applied(_Exchange, sent, out_sizes, in_sizes, group)
