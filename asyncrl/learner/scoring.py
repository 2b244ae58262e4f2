"""A Hugging Face causal language model that answers with log-probs of the sampled tokens instead of logits.

Only positions that predict a sampled token go through the head, ``chunk_tokens`` at a time; with more than one chunk the logits of
each are computed again in the backward pass, so that no more than one chunk of them ever lives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.packed import PackedModel

__all__ = ["Scorer", "chunk_tokens_of", "tempered_logprobs"]


class Scorer(PackedModel):
    """Packed tokens → log-probs and entropies of the sampled ones.

    Args:
        chunk_tokens: positions whose logits exist at a time; the others are those of :class:`PackedModel`.
    """

    def __init__(self, model: Any, *, attention: str, chunk_tokens: int, compute_dtype: torch.dtype, router_loss: bool = False) -> None:
        super().__init__(model, attention=attention, compute_dtype=compute_dtype, router_loss=router_loss)
        self.chunk_tokens = chunk_tokens

    def forward(self, micro: MicroBatch, entropy_gradient: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs at each trajectory's temperature and entropies, both float32 [K], and the router's loss."""
        decoded = self.decode(micro)
        own = slice(None) if decoded.own is None else decoded.own
        logprobs, entropy = self._head(decoded.hidden, micro.targets[own], micro.temperatures[own], entropy_gradient)
        return self.collect(logprobs, decoded, micro), self.collect(entropy, decoded, micro), decoded.router

    def predict(self, micro: MicroBatch) -> torch.Tensor:
        """Log-probs, float32 [K]."""
        logprobs: torch.Tensor = self(micro, False)[0]
        return logprobs

    @staticmethod
    def alone(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See :class:`PackedModel`."""
        return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]

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


def chunk_tokens_of(model: Any, chunk_mib: float) -> int:
    """Tokens whose float32 logits fill ``chunk_mib`` MiB, at least one.

    Example: 151,936 words and 128 MiB are 220 tokens.
    """
    return max(1, int(chunk_mib * 2**20 / (4 * model.get_output_embeddings().weight.shape[0])))


def tempered_logprobs(
    head: Any, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(head(h)/T) at the targets, and the entropy of that distribution; float32 [K].

    Example: logits [2, 1, 0] at T = 0.5 give token 0 the log-prob −0.1429.
    """
    # in place: a copy of the logits is what counts here
    logits = head(hidden).float().div_(temperatures[:, None])  # [K, V]
    logprobs = torch.log_softmax(logits, dim=-1)
    # not a view of the gathered column: FSDP hangs its backward hook on what leaves the root module
    chosen = -torch.nn.functional.nll_loss(logprobs, targets, reduction="none")
    if entropy_gradient:
        return chosen, -(logprobs.exp() * logprobs).sum(-1)
    with torch.no_grad():
        return chosen, -logprobs.exp().mul_(logprobs).sum(-1)
