"""Log-probs and entropies where each tensor-parallel rank holds the head's rows of a part of the vocabulary.

Logits never leave their rank and never live all at once: the forward pass keeps the logarithm of their sum and the entropy of each
token, and the backward pass computes them again, ``chunk_tokens`` at a time, without any collective.

Shapes: K sampled tokens, H hidden units, v words of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["tempered_logprobs"]


def tempered_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    chunk_tokens: int,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(h Wᵀ / T) at the targets and the entropy of that distribution, float32 [K], the same on every rank of ``group``.

    The gradient of ``hidden`` is this rank's part of the sum over the group; that of the entropy is taken where ``entropy_gradient``.

    Args:
        hidden: [K, H]; weight: [v, H], the words from rank · v on; targets: int64 [K]; temperatures: float32 [K].
    """
    function: Any = _Tempered  # torch leaves apply() without types
    logprobs, entropies = function.apply(hidden, weight, targets, temperatures, group, chunk_tokens)
    return logprobs, entropies if entropy_gradient else entropies.detach()


class _Tempered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        group: dist.ProcessGroup,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = targets - dist.get_rank(group) * weight.shape[0]
        parts = [
            _forward(_logits(hidden[part], weight, temperatures[part]), own[part], group) for part in _chunks(len(targets), chunk_tokens)
        ]
        chosen, log_sums, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, own, temperatures, log_sums, entropies)
        ctx.chunk_tokens = chunk_tokens
        return chosen - log_sums, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, own, temperatures, log_sums, entropies = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for part in _chunks(len(own), ctx.chunk_tokens):
            logprobs = _logits(hidden[part], weight, temperatures[part]).sub_(log_sums[part, None])
            of_logits = _backward(logprobs, own[part], entropies[part], gradients[0][part], gradients[1][part])
            of_logits = of_logits.div_(temperatures[part, None]).to(hidden.dtype)
            of_hidden[part] = of_logits @ weight
            of_weight.addmm_(of_logits.T, hidden[part])
        return of_hidden, of_weight, None, None, None, None


def _chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, max(tokens, 1), chunk_tokens)]


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T).float().div_(temperatures[:, None])  # [k, v]


def _here(own: torch.Tensor, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets are words of this rank, and each one's column; 0 for the others."""
    here = (own >= 0) & (own < words)
    return here, own.where(here, torch.zeros_like(own))[:, None]


def _forward(logits: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Logit of the target, log Σ exp of all logits, entropy."""
    top = logits.amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    here, column = _here(own, logits.shape[1])
    chosen = logits.gather(1, column)[:, 0] * here
    above = logits.sub_(top[:, None])
    weights = above.exp()
    sums = torch.stack((chosen, weights.sum(-1), weights.mul_(above).sum(-1)))
    dist.all_reduce(sums, group=group)
    log_sum = sums[1].log()
    return sums[0], log_sum + top, log_sum - sums[2] / sums[1]


def _backward(
    logprobs: torch.Tensor, own: torch.Tensor, entropies: torch.Tensor, of_logprobs: torch.Tensor, of_entropies: torch.Tensor
) -> torch.Tensor:
    """d log p_t = 1[j = t] − p_j and dH = −p_j (log p_j + H), both by logit j: float32 [k, v]."""
    probabilities = logprobs.exp()
    gradient = logprobs.add_(entropies[:, None]).mul_(-of_entropies[:, None]).sub_(of_logprobs[:, None]).mul_(probabilities)
    here, column = _here(own, gradient.shape[1])
    return gradient.scatter_add_(1, column, (of_logprobs * here)[:, None])
