"""Batches for the learner's benchmarks: what the arithmetic recipe trains, and one with a long tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.algorithms.losses import Denominators
from asyncrl.config import Config
from asyncrl.learner.batch import Batch, Row
from asyncrl.tasks import new_source
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan

__all__ = ["arithmetic_groups", "batch_of", "distinct_tokens", "long_tailed_groups", "new_group", "rows_of"]

TAIL = 1.1
"""Exponent of the Pareto distribution of a group's response lengths: one of the heaviest that still has a mean."""


def arithmetic_groups(config: Config, model_dir: str, num_groups: int) -> list[TrajectoryGroup]:
    """Groups of a sums recipe: its prompts and template; half of the responses are the answer, the others numbers of 1 to 4 digits."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    source, rng = new_source(config), np.random.default_rng(0)
    groups = []
    for ticket in range(num_groups):
        prompt = source.prompt(ticket)
        prompt_ids = tokenizer(prompt.prompt)["input_ids"]
        texts = [prompt.answer if s % 2 else str(rng.integers(10 ** rng.integers(1, 5))) for s in range(config.algorithm.group_size)]
        responses = [tokenizer(f"{text}\n")["input_ids"][: config.generator.max_new_tokens] for text in texts]
        groups.append(new_group(ticket, prompt_ids, responses))
    return groups


def long_tailed_groups(num_groups: int, group_size: int, *, vocabulary: int, longest: int, seed: int = 0) -> list[TrajectoryGroup]:
    """Random tokens behind prompts of 16; a group's responses are about as long as one another, groups differ by their tail."""
    rng = np.random.default_rng(seed)
    groups = []
    for ticket in range(num_groups):
        typical = 16.0 * (1.0 + rng.pareto(TAIL))
        lengths = np.clip(typical * rng.uniform(0.7, 1.3, group_size), 1, longest).astype(int)
        draw = [rng.integers(1, vocabulary, length).tolist() for length in (16, *lengths)]
        groups.append(new_group(ticket, draw[0], draw[1:]))
    return groups


def rows_of(groups: Sequence[TrajectoryGroup]) -> tuple[Row, ...]:
    """Rows whose advantage is that of their reward, ±1."""
    return tuple(Row(trajectory=t, advantage=2.0 * t.reward - 1.0) for group in groups for t in group.trajectories)


def batch_of(mine: Sequence[TrajectoryGroup], all_groups: Sequence[TrajectoryGroup], quadratic: float | None) -> Batch:
    """One replica's groups, with the denominators of all; ``quadratic`` as in :class:`~asyncrl.learner.batch.Batch`."""
    rows = rows_of(all_groups)
    tokens = sum(row.trajectory.num_sampled_tokens for row in rows)
    return Batch(rows_N=rows_of(mine), denominators=Denominators(tokens=tokens, trajectories=len(rows)), quadratic=quadratic)


def distinct_tokens(groups: Sequence[TrajectoryGroup]) -> int:
    """Each group's prompt once, and every response."""
    return sum(g.trajectories[0].prompt_length + sum(len(t) - t.prompt_length for t in g.trajectories) for g in groups)


def new_group(ticket: int, prompt: list[int], responses: Sequence[list[int]]) -> TrajectoryGroup:
    """Siblings whose responses are all sampled, with rewards 0 and 1 in turn."""
    return TrajectoryGroup(trajectories=tuple(_trajectory(ticket, sibling, prompt, ids) for sibling, ids in enumerate(responses)))


def _trajectory(ticket: int, sibling: int, prompt: list[int], response: list[int]) -> Trajectory:
    sampled = np.arange(len(prompt) + len(response)) >= len(prompt)
    fields: dict[str, Any] = {"group_id": f"g{ticket}", "prompt_id": f"p{ticket}", "generator": "generator-0", "engine": "bench"}
    return Trajectory.checked(
        ticket=ticket, attempt=0, sibling=sibling, sample=0, seed=sibling, incarnation=0, input_ids=[*prompt, *response],
        loss_mask=sampled, behavior_logprobs=np.where(sampled, np.float32(-1.0), np.float32(0.0)),
        version_spans=[VersionSpan(len(prompt), 0)], reward=float(sibling % 2), finish_reason="stop", temperature=1.0,
        dispatched_s=0.0, finished_s=1.0, **fields,
    )  # fmt: skip
