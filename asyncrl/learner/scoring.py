"""A Hugging Face causal language model that answers with log-probs of the sampled tokens instead of logits.

Wrapping it in one module lets FSDP's root hooks gather embedding, final norm and head for the whole pass. Only positions that
predict a sampled token go through the head, ``chunk_tokens`` at a time; with more than one chunk the logits of each are computed
again in the backward pass, so that no more than one chunk of them ever lives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.packing import attention_mask

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

    def forward(self, micro: MicroBatch, entropy_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs at each trajectory's temperature and entropies, both float32 [K]."""
        mask = attention_mask(micro, additive=self.compute_dtype if self.attention == "eager" else None)
        output = self.model.get_decoder()(input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=mask, use_cache=False)
        hidden = output.last_hidden_state[0].index_select(0, micro.sources)  # [K, H]
        head = self.model.get_output_embeddings()
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start in range(0, len(micro.targets), self.chunk_tokens):
            part = slice(start, start + self.chunk_tokens)
            arguments = (head, hidden[part], micro.targets[part], micro.temperatures[part], entropy_gradient)
            if len(micro.targets) > self.chunk_tokens and torch.is_grad_enabled():
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
