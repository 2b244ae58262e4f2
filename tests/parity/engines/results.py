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
    """``prediction``: log-prob at the trajectory's temperature in nats, or value; ``loss``: of the token, not yet divided."""

    prediction: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Three training steps; each tuple has one entry a step.

    Attributes:
        tokens: of the forward pass that was trained; losses, norms: of the step (the norm before clipping).
        start, end: float32 weights under the names of Hugging Face's files, before the first step and after the last.
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
        scored: predictions for the first step's tokens at the start, from ``infer_batch`` of a source.
        reference: the same after the last step with the adapters off; empty without adapters.
        adapters: A of each adapted layer at the start, by the name of its weight.
        tokens: pairs as they went through the loss, repetitions included.
        micro_batches: forward passes of each step, fillers included; packed_tokens: computed in each step, fillers not.
        losses: of the step, a router's part included.
    """

    replica: int
    replicas: int
    is_source: bool
    scored: Mapping[TokenKey, float]
    reference: Mapping[TokenKey, float]
    adapters: Mapping[str, np.ndarray]
    tokens: tuple[tuple[tuple[TokenKey, TokenValues], ...], ...]
    micro_batches: tuple[int, ...]
    packed_tokens: tuple[int, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    start: Mapping[str, np.ndarray]
    end: Mapping[str, np.ndarray]
