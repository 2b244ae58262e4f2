"""Ranks that train a little, hand out their weights in mid-training as a publisher gets them, and score rows with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from learner_support import batch_of, random_groups, rows_of, settings, spec

from asyncrl.algorithms.losses import Denominators
from asyncrl.learner.batch import Batch
from asyncrl.learner.objective import PolicyObjective
from asyncrl.learner.probe_rows import probe_row
from asyncrl.learner.registry import EngineRegistry

__all__ = ["Exported", "Order", "train_and_export"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``learner``: options of the engine; ``rows``: token ids and how many of them are the prompt."""

    model_dir: str
    learner: Mapping[str, Any]
    rows: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What the publisher gets (``weights``, ``ties``), and log-probs of the rows under it."""

    weights: Mapping[str, np.ndarray]
    ties: Mapping[str, str]
    logprobs: tuple[np.ndarray, ...]


def train_and_export(order: Order) -> Exported | None:
    """Two steps, the same each time it is called; the answer of a source alone, where the publisher is."""
    options = spec(order.model_dir, learning_rate=0.02, warmup_steps=0, **order.learner)
    kind = EngineRegistry.find(model_type="language_model", backend=options.learner.engine, device="cpu")
    engine = kind(options)
    engine.initialize()
    for seed in range(2):
        batch = batch_of(rows_of(random_groups(4, 4, seed=seed)))
        engine.train_batch(batch, PolicyObjective(settings(), "behavior"), should_stop=lambda: False, rescale=lambda sums: 1.0)
    weights = {name: tensor.float().numpy().copy() for name, tensor in engine.named_tensors()}
    rows = tuple(probe_row(np.array(ids), prompt, group_id=f"r{k}", ticket=k) for k, (ids, prompt) in enumerate(order.rows))
    scored = engine.infer_batch(Batch(rows_N=rows, denominators=Denominators(tokens=0, trajectories=0)), should_stop=lambda: False)
    if not engine.is_mp_source:
        return None
    logprobs = tuple(found[prompt:] for found, (_, prompt) in zip(scored.predictions_N, order.rows, strict=True))
    return Exported(weights=weights, ties=engine.ties(), logprobs=logprobs)
