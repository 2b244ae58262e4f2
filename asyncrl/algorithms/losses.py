"""The clipped policy-gradient loss on sampled tokens, with the correction for a stale behaviour policy.

Sums, never means: what divides them is counted once per optimizer step over all ranks and handed in, so the loss and its
gradient do not depend on how a mini-batch is cut into micro-batches or ranks. One mask serves numerator and denominator.

Source: PPO (arXiv:1707.06347, eq. 7); decoupled PPO (arXiv:2110.00641) for the three policies; truncated importance
sampling (IMPALA, arXiv:1802.01561) for ``truncate``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algorithms.divergence import importance_weights, k3

__all__ = ["STATISTICS", "Denominators", "LossOutput", "LossSettings", "LossTokens", "policy_loss"]

STATISTICS = (
    "tokens",
    "kept_tokens",
    "kept_trajectories",
    "loss",
    "clipped",
    "abs_log_ratio",
    "entropy",
    "k3",
    "weight",
    "weight_square",
    "correction",
    "beyond_cap",
)
"""Names of the float64 sums that :class:`LossOutput` carries, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss is; see the options of the same names."""

    clip_low: float
    clip_high: float
    correction: str
    correction_cap: float
    aggregation: str
    entropy_bonus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """Trained tokens and trajectories of one optimizer step, over all ranks."""

    tokens: int
    trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """The sampled tokens of one micro-batch, flat.

    Attributes:
        logprobs, entropy: float32 [K] under the current policy, with gradient.
        proximal_logprobs: float32 [K], denominator of the ratio, without gradient.
        behavior_logprobs: float32 [K] under the policy that sampled.
        advantages: float32 [K].
        mask: float32 [K], 1.0 for a token that counts, 0.0 for filler.
        rows: int64 [K], which trajectory of the micro-batch a token belongs to; a trajectory is never split.
        num_rows: trajectories in the micro-batch.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    proximal_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """``loss``: scalar float32 to run backward from; ``sums``: float64 [len(STATISTICS)], detached."""

    loss: torch.Tensor
    sums: torch.Tensor


def policy_loss(tokens: LossTokens, settings: LossSettings, denominators: Denominators) -> LossOutput:
    """−Σ wₖ·(cₖ·min(rₖAₖ, clip(rₖ)Aₖ) + β·Hₖ) over the micro-batch.

    r = current/proximal; c = proximal/behaviour, detached, by ``settings.correction``: absent, min(c, cap), or the token taken out where
    c > cap. w is 1/tokens (``token_mean``) or 1/(tokens of the trajectory · trajectories) (``sequence_mean``). Tokens that the
    correction takes out leave the trajectory's own count here; the global count follows through ``kept_tokens`` and
    ``kept_trajectories``, by which the caller rescales the gradient before the optimizer step.

    Example:
        >>> one = torch.tensor([1.0]); s = LossSettings(clip_low=0.2, clip_high=0.2, correction="off", correction_cap=2.0,
        ...     aggregation="token_mean", entropy_bonus=0.0)
        >>> t = LossTokens(logprobs=-2 * one, entropy=one, proximal_logprobs=-one, behavior_logprobs=-one, advantages=one,
        ...     mask=one, rows=torch.tensor([0]), num_rows=1)
        >>> round(policy_loss(t, s, Denominators(tokens=1, trajectories=1)).loss.item(), 3)  # −e⁻¹
        -0.368
    """
    log_ratio = tokens.logprobs - tokens.proximal_logprobs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    surrogate = torch.minimum(ratio * tokens.advantages, clipped_ratio * tokens.advantages)
    correction, kept = _correction(tokens, settings)
    weights = _weights(tokens, kept, settings, denominators)
    per_token = -surrogate if correction is None else -surrogate * correction
    if settings.entropy_bonus > 0.0:
        per_token = per_token - settings.entropy_bonus * tokens.entropy
    # a token that does not count is cut off from the graph: its value may be anything
    loss = (torch.where(kept > 0, per_token, torch.zeros_like(per_token)) * weights).sum()
    with torch.no_grad():
        clipped = (clipped_ratio * tokens.advantages < ratio * tokens.advantages).float()
        sums = _sums(tokens, loss, kept, clipped, log_ratio, settings)
    return LossOutput(loss=loss, sums=sums)


def _correction(tokens: LossTokens, settings: LossSettings) -> tuple[torch.Tensor | None, torch.Tensor]:
    if settings.correction == "off":
        return None, tokens.mask
    weight = importance_weights(tokens.proximal_logprobs, tokens.behavior_logprobs).float()
    if settings.correction == "truncate":
        return weight.clamp(max=settings.correction_cap), tokens.mask
    return weight, tokens.mask * (weight <= settings.correction_cap)


def _weights(tokens: LossTokens, kept: torch.Tensor, settings: LossSettings, denominators: Denominators) -> torch.Tensor:
    if settings.aggregation == "token_mean":
        return kept / max(denominators.tokens, 1)
    lengths = torch.zeros(tokens.num_rows, dtype=kept.dtype, device=kept.device).index_add_(0, tokens.rows, kept)
    return kept / (lengths.clamp(min=1.0)[tokens.rows] * max(denominators.trajectories, 1))


def _sums(
    tokens: LossTokens,
    loss: torch.Tensor,
    kept: torch.Tensor,
    clipped: torch.Tensor,
    log_ratio: torch.Tensor,
    settings: LossSettings,
) -> torch.Tensor:
    mask, kept64 = tokens.mask.double(), kept.double()
    lengths = torch.zeros(tokens.num_rows, dtype=torch.float64, device=kept.device).index_add_(0, tokens.rows, kept64)
    prior = importance_weights(tokens.proximal_logprobs, tokens.behavior_logprobs)
    weight = importance_weights(tokens.logprobs, tokens.behavior_logprobs)
    values = {
        "tokens": mask,
        "kept_tokens": kept64,
        "kept_trajectories": (lengths > 0).double(),
        "loss": loss.double(),
        "clipped": clipped.double() * kept64,
        "abs_log_ratio": log_ratio.double().abs() * mask,
        "entropy": tokens.entropy.double() * mask,
        "k3": k3(tokens.logprobs, tokens.behavior_logprobs) * mask,
        "weight": weight * mask,
        "weight_square": weight * weight * mask,
        "correction": prior * mask,
        "beyond_cap": (prior > settings.correction_cap).double() * mask,
    }
    return torch.stack([values[name].sum() for name in STATISTICS])
