"""The plain process: an unwrapped Hugging Face model in float32, one trajectory at a time, no packing, own loss, a plain optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.learner.batch import Row
from engines.batches import denominators, key_of
from engines.results import Run, TokenKey, TokenValues

__all__ = ["BONUS", "CLIP", "plain_run", "token_losses"]

CLIP, BONUS = 0.2, 0.05


def plain_run(model_dir: str, steps: Sequence[tuple[Row, ...]], optimizer: str, options: dict[str, Any]) -> Run:
    """Trains every step; ``optimizer`` is ``adamw`` or ``sgd``, ``options`` those of the learner."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    updates = _optimizer(model, optimizer, options)
    start = _weights(model)
    tokens, losses, norms = [], [], []
    for rows in steps:
        seen: dict[TokenKey, TokenValues] = {}
        total = denominators(rows).tokens
        losses.append(sum(_backward(model, row, total, seen) for row in rows))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), options["grad_clip"])))
        tokens.append(seen)
        updates.step()
        updates.zero_grad()
    return Run(tokens=tuple(tokens), losses=tuple(losses), norms=tuple(norms), start=start, end=_weights(model))


def token_losses(logprobs: torch.Tensor, entropy: torch.Tensor, behavior: torch.Tensor, advantage: torch.Tensor | float) -> torch.Tensor:
    """The loss of each sampled token before it is divided: clipped surrogate against the behaviour policy, and the entropy bonus."""
    ratio = (logprobs - behavior).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(gain + BONUS * entropy)


def _backward(model: Any, row: Row, total_tokens: int, seen: dict[TokenKey, TokenValues]) -> float:
    t = row.trajectory
    ids = torch.from_numpy(t.input_ids.astype(np.int64))
    everything = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, :-1] / t.temperature, -1)
    sampled = torch.from_numpy(t.loss_mask[1:].copy())
    logprobs = everything.gather(1, ids[1:, None])[:, 0][sampled]
    entropy = -(everything.exp() * everything).sum(-1)[sampled]
    losses = token_losses(logprobs, entropy, torch.from_numpy(t.behavior_logprobs[1:].copy())[sampled], row.advantage)
    loss = losses.sum() / total_tokens
    loss.backward()
    for k, column in enumerate(np.flatnonzero(t.loss_mask).tolist()):
        seen[*key_of(row), column] = TokenValues(logprob=logprobs[k].item(), loss=losses[k].item())
    return loss.item()


def _optimizer(model: Any, name: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=options["learning_rate"])
    return torch.optim.AdamW(model.parameters(), lr=options["learning_rate"], betas=(0.9, 0.99), eps=options["epsilon"], weight_decay=0.0)


def _weights(model: Any) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
