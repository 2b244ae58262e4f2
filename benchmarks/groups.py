"""Synthetic groups of a wanted size, and the sums that prove what arrived."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan

__all__ = ["BYTES_PER_TOKEN", "NUM_TRAJECTORIES", "make_group", "token_bytes", "token_sum"]

NUM_TRAJECTORIES = 64
"""Of a measured group."""

BYTES_PER_TOKEN = 8.125  # int32 id, float32 log-prob, one bit of mask


def make_group(num_trajectories: int, trajectory_mb: float, seed: int = 0, ticket: int = 0) -> TrajectoryGroup:
    """Trajectories of about ``trajectory_mb`` million bytes each, no two alike."""
    num_tokens = int(trajectory_mb * 1e6 / BYTES_PER_TOKEN)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 150_000, num_tokens, dtype=np.int32)
    mask = np.arange(num_tokens) >= max(1, num_tokens // 10)
    logprobs = np.where(mask, -rng.random(num_tokens, dtype=np.float32), np.float32(0.0))
    rows = [_row(sibling, ticket, ids + np.int32(sibling), mask.copy(), logprobs.copy()) for sibling in range(num_trajectories)]
    return TrajectoryGroup(trajectories=tuple(rows))


def _row(sibling: int, ticket: int, ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray) -> Trajectory:
    return Trajectory.checked(
        group_id=f"g{ticket}", ticket=ticket, attempt=0, sibling=sibling, sample=0, prompt_id="p", seed=sibling, incarnation=0,
        input_ids=ids, loss_mask=mask, behavior_logprobs=logprobs, version_spans=[VersionSpan(0, 0)], reward=float(sibling % 2),
        finish_reason="stop", temperature=1.0, generator="generator-0", engine="bench", dispatched_s=0.0, finished_s=1.0,
    )  # fmt: skip


def token_bytes(group: TrajectoryGroup) -> int:
    """Bytes of the ids and log-probs, and of the masks at one bit a token: the same count for every way to carry them."""
    return int(sum(len(t) * BYTES_PER_TOKEN for t in group.trajectories))


def token_sum(arrays: Iterable[np.ndarray]) -> int:
    """XXH3-64 over arrays in order."""
    state = xxhash.xxh3_64()
    for array in arrays:
        state.update(np.ascontiguousarray(array).data)
    return state.intdigest()
