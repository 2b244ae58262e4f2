"""A Hugging Face causal language model that answers with log-probs of the sampled tokens instead of logits.

Wrapping it in one module lets FSDP's root hooks gather embedding, final norm and head for the whole pass. Only positions that
predict a sampled token go through the head, ``chunk_tokens`` at a time; with more than one chunk the logits of each are computed
again in the backward pass, so that no more than one chunk of them ever lives.

Where a replica has several ranks, each computes embedding, final norm and head for its slice of the tokens alone, and all of them
end with the log-probs of all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncrl.errors import UnsupportedError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.layout import Layout
from asyncrl.learner.packing import attention_mask
from asyncrl.learner.slices import Slices, cut, join, spread

__all__ = ["Scorer", "tempered_logprobs"]


class Scorer(nn.Module):
    """Packed tokens → (log-probs, entropy) of the sampled ones.

    Args:
        model: the causal model; its attention implementation is ``sdpa`` or ``eager``.
        attention: which of the two.
        chunk_tokens: positions whose logits exist at a time.
        compute_dtype: precision of the forward pass.
    """

    def __init__(self, model: Any, *, attention: str, chunk_tokens: int, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.chunk_tokens = chunk_tokens
        self.compute_dtype = compute_dtype
        self._layout: Layout | None = None
        self._slices: Slices | None = None

    def divide(self, layout: Layout) -> None:
        """From now on each rank of a replica computes its slice; the model's layers are divided already."""
        if layout.replica is None:
            return
        self._layout = layout
        if layout.shares == "matrices":
            self._final_norm().register_forward_pre_hook(self._cut_before_norm)

    def forward(self, micro: MicroBatch, entropy_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs at each trajectory's temperature and entropies, both float32 [K]."""
        mask = attention_mask(micro, additive=self.compute_dtype if self.attention == "eager" else None)
        if self._layout is None:
            hidden = self._decode(mask, input_ids=micro.input_ids, position_ids=micro.position_ids)
            return self._head(hidden.index_select(0, micro.sources), micro.targets, micro.temperatures, entropy_gradient)
        assert self._layout.replica_group is not None
        self._slices = slices = Slices.of(len(micro), self._layout.replica_group)
        hidden = self._decode_slice(micro, mask, slices)
        own = torch.nonzero((micro.sources >= slices.start) & (micro.sources < slices.stop))[:, 0]
        chosen = hidden.index_select(0, micro.sources[own] - slices.start)
        logprobs, entropy = self._head(chosen, micro.targets[own], micro.temperatures[own], entropy_gradient)
        size = len(micro.targets)
        return spread(logprobs, own, size, slices.group), spread(entropy, own, size, slices.group)

    def _decode(self, mask: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model.get_decoder()(attention_mask=mask, use_cache=False, **inputs).last_hidden_state[0]
        return hidden

    def _decode_slice(self, micro: MicroBatch, mask: torch.Tensor, slices: Slices) -> torch.Tensor:
        """Final hidden states [n, H] of this rank's slice."""
        assert self._layout is not None
        own = slice(slices.start, slices.stop)
        if self._layout.shares == "tokens":
            return self._decode(mask, input_ids=micro.input_ids[:, own], position_ids=micro.position_ids[:, own])
        embedded = self.model.get_input_embeddings()(micro.input_ids[0, own])
        return self._decode(mask, inputs_embeds=join(embedded, slices)[None], position_ids=micro.position_ids)

    def _cut_before_norm(self, module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert self._slices is not None
        return cut(arguments[0][0], self._slices)[None], *arguments[1:]

    def _final_norm(self) -> nn.Module:
        decoder = self.model.get_decoder()
        norm = getattr(decoder, "norm", None)
        others = {name.split(".")[0] for name, _ in decoder.named_parameters()} - {"layers", "embed_tokens", "norm"}
        if not isinstance(norm, nn.Module) or others:
            raise UnsupportedError(
                f"learner.tensor_parallel wants a decoder of embed_tokens, layers and norm; {type(decoder).__name__} "
                + (f"has {', '.join(sorted(others))} too" if others else "has no norm")
            )
        return norm

    def _head(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of [K, H], ``chunk_tokens`` at a time."""
        head = self.model.get_output_embeddings()
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start in range(0, max(len(targets), 1), self.chunk_tokens):
            part = slice(start, start + self.chunk_tokens)
            arguments = (head, hidden[part], targets[part], temperatures[part], entropy_gradient)
            if len(targets) > self.chunk_tokens and torch.is_grad_enabled():
                pieces.append(checkpoint(tempered_logprobs, *arguments, use_reentrant=False, preserve_rng_state=False))
            else:
                pieces.append(tempered_logprobs(*arguments))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def tempered_logprobs(
    head: Any, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(head(h)/T) at the targets, and the entropy of that distribution; float32 [K].

    Example: logits [2, 1, 0] at T = 0.5 give token 0 the log-prob −0.1429.
    """
    logits = head(hidden).float() / temperatures[:, None]  # [K, V]
    logprobs = torch.log_softmax(logits, dim=-1)
    # not a view of the gathered column: FSDP hangs its backward hook on what leaves the root module
    chosen = -torch.nn.functional.nll_loss(logprobs, targets, reduction="none")
    if entropy_gradient:
        return chosen, -(logprobs.exp() * logprobs).sum(-1)
    with torch.no_grad():
        return chosen, -(logprobs.exp() * logprobs).sum(-1)
