"""From the rewards of a group to one advantage per trajectory, in two-pass float64.

Ragged names: ``_N`` trajectories of one batch, in any order. Groups are found by identity, never by position.

Source: GRPO (arXiv:2402.03300, eq. 1 ff.), Dr. GRPO (arXiv:2503.20783) for ``centered``, RLOO (arXiv:2402.14740) for ``leave_one_out``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.errors import ConfigError, DataError

__all__ = ["Advantages", "advantage_kinds", "group_advantages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """One advantage per trajectory, and whether its group's rewards differ at all.

    Attributes:
        values_N: float64 [N]; exactly 0.0 where there is no signal.
        has_signal_N: bool [N].
    """

    values_N: np.ndarray
    has_signal_N: np.ndarray


def group_advantages(group_ids_N: Sequence[str], siblings_N: Sequence[int], rewards_N: Sequence[float], kind: str) -> Advantages:
    """Advantages of trajectories against the siblings of their own group.

    A sibling that a broken template split into several samples counts once in the moments; each of its samples gets the
    sibling's advantage. A group whose largest reward equals its smallest has no signal: decided before any division.

    Args:
        group_ids_N, siblings_N, rewards_N: of each trajectory; all as long as each other.
        kind: ``grpo`` (mean off, over the sample standard deviation), ``centered`` (mean off), ``leave_one_out`` (mean of the others off).

    Raises:
        ConfigError: unknown kind.
        DataError: a reward that is not finite, or two rewards for one sibling.

    Example:
        >>> group_advantages(["a", "a", "b", "b"], [0, 1, 0, 1], [1.0, 0.0, 0.5, 0.5], "centered").values_N.tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    if kind not in _KINDS:
        raise ConfigError(f"algorithm.advantage is one of {', '.join(advantage_kinds())}; met {kind!r}")
    values = np.zeros(len(rewards_N), dtype=np.float64)
    signal = np.zeros(len(rewards_N), dtype=bool)
    for group_id, rows in _rows_by_group(group_ids_N).items():
        rewards = _sibling_rewards(group_id, [siblings_N[i] for i in rows], [rewards_N[i] for i in rows])
        scores = np.array(list(rewards.values()), dtype=np.float64)
        if scores.max() == scores.min():
            continue
        of_sibling = dict(zip(rewards, _KINDS[kind](scores), strict=True))
        for i in rows:
            values[i], signal[i] = of_sibling[siblings_N[i]], True
    return Advantages(values_N=values, has_signal_N=signal)


def advantage_kinds() -> list[str]:
    """The names that ``group_advantages`` knows."""
    return sorted(_KINDS)


def _rows_by_group(group_ids_N: Sequence[str]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for i, group_id in enumerate(group_ids_N):
        rows.setdefault(group_id, []).append(i)
    return rows


def _sibling_rewards(group_id: str, siblings: list[int], rewards: list[float]) -> dict[int, float]:
    by_sibling: dict[int, float] = {}
    for sibling, reward in zip(siblings, rewards, strict=True):
        if not np.isfinite(reward):
            raise DataError(f"rewards are finite; met {reward}: remove the sibling instead", group_id=group_id, sibling=sibling)
        if by_sibling.setdefault(sibling, float(reward)) != reward:
            raise DataError(f"the samples of one sibling share its reward; met {by_sibling[sibling]} and {reward}", group_id=group_id)
    return by_sibling


def _grpo(scores: np.ndarray) -> np.ndarray:
    centred = scores - scores.mean()
    return np.asarray(centred / np.sqrt((centred**2).sum() / (len(scores) - 1)))


def _centered(scores: np.ndarray) -> np.ndarray:
    return np.asarray(scores - scores.mean())


def _leave_one_out(scores: np.ndarray) -> np.ndarray:
    return np.asarray((scores - scores.mean()) * (len(scores) / (len(scores) - 1)))


_KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"grpo": _grpo, "centered": _centered, "leave_one_out": _leave_one_out}
