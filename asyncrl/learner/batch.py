"""What the worker hands to an engine and gets back: rows of one optimizer step, jagged, on one data-parallel replica.

Ragged names: ``_N`` rows, ``_T`` tokens of one row, ``K`` sampled tokens of a micro-batch, ``L`` its packed length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from asyncrl.algorithms.losses import Denominators, LossOutput
from asyncrl.trajectory import Trajectory

__all__ = ["Batch", "BatchOutput", "LossFunction", "MicroBatch", "Row", "TrainOutput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory to train or score.

    ``proximal_logprobs`` is float32 [T] like ``behavior_logprobs``, or None where the loss takes another denominator; ``returns`` is
    float32 [T], what a critic learns to predict at each sampled token, or None.
    """

    trajectory: Trajectory
    advantage: float
    proximal_logprobs: np.ndarray | None = None
    returns: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This replica's rows of one mini-batch (perhaps none) and the denominators over all replicas.

    ``quadratic``: cost of a token pair in units of a token, by which micro-batches are ordered; None where no other replica waits.
    """

    rows_N: tuple[Row, ...]
    denominators: Denominators
    quadratic: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed forward pass: no padding, several segments side by side.

    Attributes:
        input_ids, position_ids: int64 [1, L]; positions restart in each sequence and go on after a shared prompt.
        segments, parents: int64 [L]; a token sees earlier tokens of its own segment and of its parent, nothing else.
        sources: int64 [K], place of the hidden state that predicts a sampled token; targets: int64 [K], that token's id.
        temperatures, behavior_logprobs, advantages, mask: float32 [K]; mask is 0.0 for filler.
        proximal_logprobs, returns: float32 [K] or None.
        rows: int64 [K], index into ``row_indices``; columns: int64 [K], the token's index in its trajectory.
        row_segments, row_parents: int64 [R], for each row of this micro-batch its segment and that of its prompt (the same if unshared).
        row_indices: for each row of this micro-batch, its index in ``Batch.rows_N``; empty for filler.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: torch.Tensor
    parents: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor
    behavior_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor | None
    returns: torch.Tensor | None
    advantages: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    row_segments: torch.Tensor
    row_parents: torch.Tensor
    row_indices: tuple[int, ...]

    def __len__(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        if device.type == "cpu":
            return self
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        moved: dict[str, Any] = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        return MicroBatch(**moved)


class LossFunction(Protocol):
    """(predictions, micro-batch, denominators) → loss and sums.

    Predictions are log-probs and entropy of a language model, values of a value model, each float32 [K]. ``entropy_gradient``: whether
    the loss uses the gradient of the entropy.
    """

    @property
    def entropy_gradient(self) -> bool: ...

    def __call__(self, *arguments: Any) -> LossOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutput:
    """What the micro-batches of one mini-batch gave.

    Attributes:
        sums: float64, the loss's statistics over all replicas; None without a loss.
        router_loss: of a mixture of experts, mean over the trajectories of all replicas.
        predictions_N: float32 [T] per row when only the forward pass ran: log-probs or values, index i of token i, 0.0 where nothing
            was sampled.
        packed_tokens: tokens computed on this replica.
    """

    sums: torch.Tensor | None
    predictions_N: tuple[np.ndarray, ...]
    packed_tokens: int
    router_loss: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutput:
    """``grad_norm`` before clipping; ``stepped`` False where the step was skipped and ``skipped`` says why."""

    sums: torch.Tensor
    packed_tokens: int
    grad_norm: float
    stepped: bool
    skipped: str = ""
    router_loss: float = 0.0
