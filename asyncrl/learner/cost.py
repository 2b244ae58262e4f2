"""What training costs: seconds ≈ a · tokens + b · pairs, where a pair is a token and one that it attends to.

Only the ratio b/a decides a plan, so costs are counted in units of a token. Without a measurement it is 1/(6 · hidden size): a layer
spends about 24 · hidden² operations on a token (projections and a feed-forward of four times the width) and 4 · hidden on a pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Timing", "analytic_ratio", "fitted_ratio", "work_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A pass over ``tokens`` packed tokens with ``pairs`` took ``seconds``."""

    tokens: int
    pairs: int
    seconds: float


def work_of(lengths_N: Sequence[int], shared_tokens: int) -> tuple[int, int]:
    """(tokens, pairs) of sequences that share a prompt of ``shared_tokens`` (0: nothing), each with ``lengths_N`` tokens of its own.

    Example: 3 and 3 tokens behind a prompt of 2 are 8 tokens; the prompt has 2 · 2 pairs, each sequence 3 · (3 + 2 · 2).
    """
    tokens = shared_tokens + sum(lengths_N)
    pairs = shared_tokens**2 + sum(length * (length + 2 * shared_tokens) for length in lengths_N)
    return tokens, pairs


def analytic_ratio(hidden_size: int) -> float:
    """Cost of a pair in units of a token, from operation counts."""
    return 1.0 / (6.0 * hidden_size)


def fitted_ratio(timings: Sequence[Timing]) -> float | None:
    """b/a by least squares with a > 0 and b ≥ 0.

    None where the timings cannot tell tokens from pairs, or a token came out as free.

    Example: 100 tokens in 1 s with 1,000 pairs and in 2 s with 11,000: b = 1e-4, a = 9e-3, the ratio is 1/90.
    """
    tt = math.fsum(t.tokens**2 for t in timings)
    pp = math.fsum(t.pairs**2 for t in timings)
    tp = math.fsum(t.tokens * t.pairs for t in timings)
    ts = math.fsum(t.tokens * t.seconds for t in timings)
    ps = math.fsum(t.pairs * t.seconds for t in timings)
    determinant = tt * pp - tp * tp
    if determinant <= 1e-6 * tt * pp:
        return None
    token_s, pair_s = (ts * pp - ps * tp) / determinant, (ps * tt - ts * tp) / determinant
    if pair_s <= 0.0:
        return 0.0 if ts > 0.0 else None
    return pair_s / token_s if token_s > 0.0 else None
