"""Losses as a worker hands them to an engine: the policy's with what serves as the proximal policy, and the critic's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from asyncrl.algorithms.losses import STATISTICS, Denominators, LossOutput, LossSettings, LossTokens, policy_loss
from asyncrl.algorithms.values import value_loss
from asyncrl.config import AlgorithmConfig
from asyncrl.learner.batch import MicroBatch

__all__ = ["Objective", "PolicyObjective", "Proximal", "ValueObjective", "loss_settings"]

Proximal = Literal["behavior", "current", "given"]
"""Denominator of the ratio: behaviour log-probs, the detached current ones, or those that the rows carry."""


class Objective(Protocol):
    """A :class:`~asyncrl.learner.batch.LossFunction` that corrects its denominator after the batch."""

    @property
    def entropy_gradient(self) -> bool: ...

    def __call__(self, *arguments: Any) -> LossOutput: ...

    def rescale(self, sums: torch.Tensor, denominators: Denominators) -> float | None:
        """What the gradient is multiplied by before the step; None where nothing was trained."""


def loss_settings(algorithm: AlgorithmConfig) -> LossSettings:
    """The part of the options that the loss reads."""
    return LossSettings(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        correction=algorithm.correction,
        correction_cap=algorithm.correction_cap,
        aggregation=algorithm.aggregation,
        entropy_bonus=algorithm.entropy_bonus,
    )


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """A :class:`~asyncrl.learner.batch.LossFunction` around ``policy_loss``."""

    settings: LossSettings
    proximal: Proximal

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss uses the gradient of the entropy."""
        return self.settings.entropy_bonus > 0.0

    def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch, denominators: Denominators) -> LossOutput:
        tokens = LossTokens(
            logprobs=logprobs,
            entropy=entropy,
            proximal_logprobs=self._proximal(logprobs, micro),
            behavior_logprobs=micro.behavior_logprobs,
            advantages=micro.advantages,
            mask=micro.mask,
            rows=micro.rows,
            num_rows=max(len(micro.row_indices), 1),
        )
        return policy_loss(tokens, self.settings, denominators)

    def rescale(self, sums: torch.Tensor, denominators: Denominators) -> float | None:
        """What corrects the denominator for tokens that the correction took out; None where nothing is left."""
        kept_tokens = float(sums[STATISTICS.index("kept_tokens")])
        if kept_tokens == 0.0:
            return None
        if self.settings.aggregation == "token_mean":
            return denominators.tokens / kept_tokens
        return denominators.trajectories / float(sums[STATISTICS.index("kept_trajectories")])

    def _proximal(self, logprobs: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        if self.proximal == "behavior":
            return micro.behavior_logprobs
        if self.proximal == "current" or not micro.row_indices:
            return logprobs.detach()
        assert micro.proximal_logprobs is not None
        return micro.proximal_logprobs


class ValueObjective:
    """The critic's: squared error of values against the returns that the rows carry."""

    entropy_gradient = False

    def __call__(self, values: torch.Tensor, micro: MicroBatch, denominators: Denominators) -> LossOutput:
        assert micro.returns is not None
        return value_loss(values, micro.returns, micro.mask, denominators)

    def rescale(self, sums: torch.Tensor, denominators: Denominators) -> float | None:
        """Nothing is taken out: 1.0, or None where there was no token."""
        return 1.0 if denominators.tokens else None
