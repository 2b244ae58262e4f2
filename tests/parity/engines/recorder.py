"""The losses that engines are given here: the production loss of a policy and a squared error of values; both note what they saw."""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses import STATISTICS, Denominators, LossOutput, LossSettings
from asyncrl.learner.batch import MicroBatch, Row
from asyncrl.learner.objective import PolicyObjective
from engines.batches import key_of
from engines.reference import BONUS, CLIP, token_losses, value_losses
from engines.results import TokenKey, TokenValues

__all__ = ["PolicyRecorder", "Recorder", "ValueRecorder"]

_LOSS = LossSettings(clip_low=CLIP, clip_high=CLIP, correction="off", correction_cap=2.0, aggregation="token_mean", entropy_bonus=BONUS)


class Recorder:
    """Notes every token that counts, and how often it was called.

    Args:
        rows: those of the batch.
    """

    entropy_gradient = False

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self.rows = rows
        self.seen: list[tuple[TokenKey, TokenValues]] = []
        self.calls = 0

    def note(self, predictions: torch.Tensor, losses: torch.Tensor, micro: MicroBatch) -> None:
        """One micro-batch; [K] each."""
        self.calls += 1
        columns = (micro.rows, micro.columns, micro.mask, predictions.detach(), losses.detach())
        for row, column, mask, prediction, loss in zip(*(c.tolist() for c in columns), strict=True):
            if mask:
                key = (*key_of(self.rows[micro.row_indices[row]]), column)
                self.seen.append((key, TokenValues(prediction=prediction, loss=loss)))


class PolicyRecorder(Recorder):
    """Around the loss that a run trains with."""

    entropy_gradient = True

    def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch, denominators: Denominators) -> LossOutput:
        losses = token_losses(logprobs.detach(), entropy.detach(), micro.behavior_logprobs, micro.advantages)
        self.note(logprobs, losses, micro)
        return PolicyObjective(_LOSS, "behavior")(logprobs, entropy, micro, denominators)


class ValueRecorder(Recorder):
    """Squared error of values against the rows' returns."""

    def __call__(self, values: torch.Tensor, micro: MicroBatch, denominators: Denominators) -> LossOutput:
        assert micro.returns is not None
        losses = value_losses(values, micro.returns)
        self.note(values, losses, micro)
        loss = (losses * micro.mask).sum() / max(denominators.tokens, 1)
        sums = torch.zeros(len(STATISTICS), dtype=torch.float64, device=values.device)
        sums[STATISTICS.index("loss")] = loss.detach()
        return LossOutput(loss=loss, sums=sums)
