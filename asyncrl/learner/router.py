"""The load-balancing loss of a mixture of experts, one term for each trajectory.

A term is a product of two means over tokens; taken over whole batches it would depend on how they are cut. Taken over the tokens
of one trajectory, its prompt included, it is the same for any pack, any number of ranks, and shared prompts or not.

Source: Switch Transformer (arXiv:2101.03961, eq. 4–6), over all layers at once as transformers computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.slices import Slices

__all__ = ["balance_loss"]


def balance_loss(logits_per_layer: Sequence[torch.Tensor], top_k: int, micro: MicroBatch, slices: Slices | None) -> torch.Tensor:
    """Σ over rows of E · Σₑ fₑ · Pₑ: scalar float32.

    fₑ is the mean number of a row's tokens that go to expert e (without gradient), Pₑ its mean probability, over tokens and layers.
    With slices it is this rank's part of the sum: f of all tokens, P of its own.

    Args:
        logits_per_layer: one [n, E] a layer, of the tokens of this rank; top_k: experts a token.

    Example:
        Logits of 0 for two experts, one a token: f = (1, 0), P = (½, ½), 2 · ½ = 1 for each row.
    """
    belongs = micro.segments[None] == micro.row_segments[:, None]
    belongs = (belongs | (micro.segments[None] == micro.row_parents[:, None])).float()  # [R, L]
    own = belongs if slices is None else belongs[:, slices.start : slices.stop]
    taken = own.new_zeros(own.shape[0], logits_per_layer[0].shape[-1])  # [R, E]
    chance = torch.zeros_like(taken)
    for logits in logits_per_layer:
        probabilities = torch.softmax(logits.float(), dim=-1)
        chosen = torch.topk(probabilities.detach(), top_k, dim=-1).indices
        taken = taken + own @ torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
        chance = chance + own @ probabilities
    if slices is not None:
        dist.all_reduce(taken, group=slices.group)
    tokens = belongs.sum(1, keepdim=True) * len(logits_per_layer)
    return logits_per_layer[0].shape[-1] * (taken / tokens * (chance / tokens)).sum()
