"""The plain process: an unwrapped Hugging Face model in float32, one trajectory at a time, no packing, own losses, a plain optimizer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.learner.batch import Row
from engines.batches import denominators, key_of
from engines.low_rank import adapt, merge
from engines.results import Run, TokenKey, TokenValues

__all__ = ["BONUS", "CLIP", "plain_run", "token_losses", "value_losses"]

CLIP, BONUS = 0.2, 0.05


def plain_run(
    model_dir: str,
    steps: Sequence[tuple[Row, ...]],
    optimizer: str,
    options: Mapping[str, Any],
    *,
    value: bool = False,
    adapters: Mapping[str, np.ndarray] | None = None,
) -> Run:
    """Trains every step.

    Args:
        optimizer: ``adamw`` or ``sgd``; options: of the learner; value: whether the model predicts returns.
        adapters: A of each linear layer that is adapted, by the name of its weight; None or empty: all weights are trained.
    """
    model = _load(model_dir, value)
    start = _weights(model)
    if adapters:
        adapt(model, adapters, options["lora_alpha"] / options["lora_rank"])
    updates = _optimizer([p for p in model.parameters() if p.requires_grad], optimizer, options)
    tokens, losses, norms = [], [], []
    for rows in steps:
        seen: dict[TokenKey, TokenValues] = {}
        losses.append(sum(_backward(model, row, denominators(rows), options.get("router_loss", 0.0), seen) for row in rows))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), options["grad_clip"])))
        tokens.append(seen)
        updates.step()
        updates.zero_grad()
    merge(model)
    return Run(tokens=tuple(tokens), losses=tuple(losses), norms=tuple(norms), start=start, end=_weights(model))


def token_losses(logprobs: torch.Tensor, entropy: torch.Tensor, behavior: torch.Tensor, advantage: torch.Tensor | float) -> torch.Tensor:
    """The loss of each sampled token before it is divided: clipped surrogate against the behaviour policy, and the entropy bonus."""
    ratio = (logprobs - behavior).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(gain + BONUS * entropy)


def value_losses(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """Half the squared error of each sampled token's value."""
    return 0.5 * (values - returns) ** 2


def _backward(model: Any, row: Row, over: Any, router_weight: float, seen: dict[TokenKey, TokenValues]) -> float:
    t = row.trajectory
    ids = torch.from_numpy(t.input_ids.astype(np.int64))
    output = model(input_ids=ids[None], use_cache=False, **({"output_router_logits": True} if router_weight else {}))
    sampled = torch.from_numpy(t.loss_mask[1:].copy())
    predictions, losses = _predict(output.logits[0, :-1], ids[1:], sampled, row)
    loss = losses.sum() / over.tokens
    if router_weight:
        loss = loss + router_weight * output.aux_loss / over.trajectories
    loss.backward()
    for k, column in enumerate(np.flatnonzero(t.loss_mask).tolist()):
        seen[*key_of(row), column] = TokenValues(prediction=predictions[k].item(), loss=losses[k].item())
    return loss.item()


def _predict(logits: torch.Tensor, targets: torch.Tensor, sampled: torch.Tensor, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    if row.returns is not None:
        values = logits[:, 0][sampled]
        return values, value_losses(values, torch.from_numpy(row.returns[1:])[sampled])
    t = row.trajectory
    everything = torch.log_softmax(logits / t.temperature, -1)
    logprobs = everything.gather(1, targets[:, None])[:, 0][sampled]
    entropy = -(everything.exp() * everything).sum(-1)[sampled]
    return logprobs, token_losses(logprobs, entropy, torch.from_numpy(t.behavior_logprobs[1:].copy())[sampled], row.advantage)


def _load(model_dir: str, value: bool) -> Any:
    import transformers

    kind = transformers.AutoModelForTokenClassification if value else transformers.AutoModelForCausalLM
    # a token classifier drops out one in ten; what is compared has to be the same each time
    return kind.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()


def _optimizer(parameters: list[torch.nn.Parameter], name: str, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=options["learning_rate"])
    return torch.optim.AdamW(parameters, lr=options["learning_rate"], betas=(0.9, 0.99), eps=options["epsilon"], weight_decay=0.0)


def _weights(model: Any) -> dict[str, np.ndarray]:
    """As transformers itself writes them to disk."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
