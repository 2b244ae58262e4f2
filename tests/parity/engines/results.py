"""What a run leaves behind to be compared: the plain process gives it whole, ranks give parts that are put together here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["RankRun", "Run", "TokenKey", "TokenValues"]

TokenKey = tuple[int, int, int]
"""(ticket, sibling, index in the trajectory) of a sampled token of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Log-prob at the trajectory's temperature in nats, and the token's loss before it is divided by the denominator."""

    logprob: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Three training steps; each tuple has one entry a step.

    Attributes:
        tokens: of the forward pass that was trained; losses, norms: of the step (the norm before clipping).
        start, end: float32 weights under Hugging Face names, before the first step and after the last.
    """

    tokens: tuple[Mapping[TokenKey, TokenValues], ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    start: Mapping[str, np.ndarray]
    end: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What one rank saw of a run.

    Attributes:
        replica, replicas, is_source: what the engine said of its layout.
        scored: log-probs of the first step's tokens at the start, from ``infer_batch``.
        tokens: pairs as they went through the loss, repetitions included.
        micro_batches: forward passes of each step, fillers included; packed_tokens: computed in each step, fillers not.
    """

    replica: int
    replicas: int
    is_source: bool
    scored: Mapping[TokenKey, float]
    tokens: tuple[tuple[tuple[TokenKey, TokenValues], ...], ...]
    micro_batches: tuple[int, ...]
    packed_tokens: tuple[int, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    start: Mapping[str, np.ndarray]
    end: Mapping[str, np.ndarray]
