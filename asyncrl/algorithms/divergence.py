"""How far the policy that learns is from the one that sampled, measured on the sampled tokens.

Every function returns per-token values; sums over them are exact under any split into micro-batches or ranks.

Source: k3 of Schulman, "Approximating KL Divergence" (2020); effective sample size of Kong (1992).
"""

from __future__ import annotations

import torch

__all__ = ["effective_sample_size", "importance_weights", "k3"]

_MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 keeps every sum finite in float64


def importance_weights(logprobs: torch.Tensor, behavior_logprobs: torch.Tensor) -> torch.Tensor:
    """π/μ of each sampled token, float64, the log-ratio held within ±20.

    Args:
        logprobs: [K] under the policy π that learns; behavior_logprobs: [K] under the policy μ that sampled.
    """
    return (logprobs.double() - behavior_logprobs.double()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def k3(logprobs: torch.Tensor, behavior_logprobs: torch.Tensor) -> torch.Tensor:
    """Unbiased, non-negative estimate of KL(μ‖π) per token sampled by μ, in nats: r − 1 − log r with r = π/μ.

    Example:
        >>> k3(torch.tensor([-2.0]), torch.tensor([-1.0])).item()  # e^-1 - 1 + 1
        0.36787944117144233
    """
    log_ratio = (logprobs.double() - behavior_logprobs.double()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return log_ratio.exp() - 1.0 - log_ratio


def effective_sample_size(weight_sum: float, weight_square_sum: float, num_tokens: float) -> float:
    """Share of the sampled tokens that the weighted sample is worth, in (0, 1]; 1.0 for no tokens.

    Example:
        >>> effective_sample_size(4.0, 10.0, 2)  # weights 1 and 3
        0.8
    """
    if num_tokens == 0 or weight_square_sum == 0.0:
        return 1.0
    return weight_sum * weight_sum / (num_tokens * weight_square_sum)
