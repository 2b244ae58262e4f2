"""The rows of the three steps, and who gets which: ragged over all replicas, all on the first, none on the first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from learner_support import trajectory

from asyncrl.algorithms.losses import Denominators
from asyncrl.learner.batch import Row
from engines.models import VOCABULARY

__all__ = ["DEALS", "STEPS", "Key", "deal", "denominators", "key_of", "steps"]

STEPS = 3
DEALS = ("rows on every replica, ragged", "all rows on the first replica", "no rows on the first replica")

Key = tuple[int, int]
"""(ticket, sibling): names a row of a step."""


def steps(model_type: str = "language_model") -> list[tuple[Row, ...]]:
    """Rows of each step: four groups of one to four siblings, prompts of 2 to 5 tokens, answers of 1 to 6, two temperatures.

    Those for a ``value_model`` have returns, which differ from token to token.
    """
    rng = np.random.default_rng(4)
    rows = [tuple(row for ticket in range(4) for row in _group(rng, ticket)) for _ in range(STEPS)]
    return rows if model_type == "language_model" else [tuple(_with_returns(row) for row in step) for step in rows]


def _group(rng: np.random.Generator, ticket: int) -> list[Row]:
    prompt = rng.integers(1, VOCABULARY, rng.integers(2, 6)).tolist()
    rows = []
    for sibling in range((4, 3, 4, 1)[ticket]):
        answer = rng.integers(1, VOCABULARY, rng.integers(1, 7)).tolist()
        behavior = [0.0] * len(prompt) + np.minimum(-4.2 + 0.5 * rng.standard_normal(len(answer)), -0.1).tolist()
        sampled = trajectory(
            prompt, answer, group=f"g{ticket}", sibling=sibling, behavior_logprobs=behavior, temperature=(1.0, 0.7)[sibling % 2]
        )
        rows.append(Row(trajectory=sampled, advantage=float(rng.uniform(0.5, 1.5)) * (-1.0) ** sibling))
    return rows


def _with_returns(row: Row) -> Row:
    return replace(row, returns=np.linspace(row.advantage, -0.5, len(row.trajectory), dtype=np.float32))


def key_of(row: Row) -> Key:
    """The row's name."""
    return row.trajectory.ticket, row.trajectory.sibling


def denominators(rows: tuple[Row, ...]) -> Denominators:
    """Counted over the rows of all replicas."""
    return Denominators(tokens=sum(row.trajectory.num_sampled_tokens for row in rows), trajectories=len(rows))


def deal(rows: tuple[Row, ...], step: int, replica: int, replicas: int) -> tuple[Row, ...]:
    """What a replica trains in a step; whole groups, as :data:`DEALS` says."""
    if replicas == 1:
        return rows
    owner = (lambda t: t % replicas, lambda t: 0, lambda t: 1 + t % (replicas - 1))[step]
    return tuple(row for row in rows if owner(row.trajectory.ticket) == replica)
