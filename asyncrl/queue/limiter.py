"""How many samples an inserted group pays for: inserts and samples hold each other back so that their ratio stays near a target.

Consumes counts, produces yes or no with the reason; the gate asks before it issues a ticket and before it forms a batch.

Symbols. σ = samples_per_insert, m = min_groups, b = error_buffer, G = groups a step, M = max_uses. I = groups inserted,
T = samples: uses of groups, and what dropped groups are written off with. The balance is d = σ I − T.

    a group may be inserted    iff  I < m  or  d + σ <= σ m + b
    n groups may be sampled    iff  I >= m  and  d − n >= σ m − b

Invariant. After every insert d <= σ m + b, after every batch d >= σ m − b. So from m inserts on T = σ I − σ m within ± b, drops
aside, and never is T > σ I − σ m + b after a batch: over time at most σ samples are taken for each insert.

Drops. A group that is dropped after u uses counts as sampled max(0, σ − u) times more (:meth:`Limiter.write_off`), else its
unused share would hold back inserts for ever.

Liveness. Suppose that an insert is refused. Then I >= m and d > σ m + b − σ.
    A batch of G is allowed: d − G > σ m + b − σ − G >= σ m − b, by 2 b >= σ + G.
    And there are G groups for it: each group that is gone was trained, with M >= σ uses, or dropped, and counts with σ or more in
    T, so at most T / σ are gone and I − T / σ = d / σ > m + b / σ − 1 remain, that is floor(m + b / σ) or more, G by m + b / σ >= G.
    So inserts and samples never wait for each other, if the caller lets groups in, whatever its own limits say, as long as
    a batch is refused: the first one needs max(m, G, m + (G − b) / σ) groups at once, and with σ < M groups that have paid stay.

Tickets. Counted as inserted at the issue of a ticket are those finished and those being sampled; for a batch only those finished.

Source: design note, section 4. The idea of an error buffer: Cassirer et al., "Reverb", 2021, section 3.3.
"""

from __future__ import annotations

import math

from asyncrl.errors import ConfigError

__all__ = ["Limiter"]

_PARTS = 10**6  # of a sample: counted in whole parts, σ and b are exact and the proof holds at its bounds


class Limiter:
    """Says whether a group may be inserted, and whether a batch may be sampled.

    Args:
        samples_per_insert: σ, 1e-6 or more, at most ``max_uses``.
        min_groups: m, inserts before the first sample, 1 or more.
        error_buffer: b, by how many samples the balance may be off its target, up and down.
        groups_per_step: G, groups of the largest batch. max_uses: M, uses of a group before it is gone.

    Raises:
        ConfigError: the settings would deadlock, with the rule and the numbers.

    Example:
        >>> limiter = Limiter(1.0, 10, 4.0, groups_per_step=4, max_uses=1)
        >>> limiter.may_insert(13, 0), limiter.may_insert(14, 0), limiter.may_sample(10, 0, 4), limiter.may_sample(10, 4, 4)
        (True, False, True, False)
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_groups: int,
        error_buffer: float,
        *,
        groups_per_step: int,
        max_uses: int,
    ) -> None:
        _check_meaning(samples_per_insert, min_groups, error_buffer)
        self._min_groups, self._rate, buffer = min_groups, round(samples_per_insert * _PARTS), round(error_buffer * _PARTS)
        _check_liveness(self._rate, min_groups, buffer, groups_per_step, max_uses)
        target = self._rate * min_groups
        self._lowest, self._highest = target - buffer, target + buffer

    def may_insert(self, inserted: int, sampled: float) -> bool:
        """Whether one more group may come in after ``inserted`` groups and ``sampled`` samples."""
        return inserted < self._min_groups or self._balance(inserted + 1, sampled) <= self._highest

    def may_sample(self, inserted: int, sampled: float, n: int) -> bool:
        """Whether ``n`` groups may be sampled after ``inserted`` groups and ``sampled`` samples."""
        return inserted >= self._min_groups and self._balance(inserted, sampled + n) >= self._lowest

    def insert_refusal(self, inserted: int, sampled: float) -> str:
        """Why no group may come in, with the numbers; empty if one may."""
        if self.may_insert(inserted, sampled):
            return ""
        return (
            f"queue.samples_per_insert × inserts − samples would be {self._sum(inserted + 1, sampled)}, and is at most "
            f"{self._highest / _PARTS:g}: waits for the learner to sample"
        )

    def sample_refusal(self, inserted: int, sampled: float, n: int) -> str:
        """Why no ``n`` groups may be sampled, with the numbers; empty if they may."""
        if self.may_sample(inserted, sampled, n):
            return ""
        if inserted < self._min_groups:
            return f"{inserted} groups were inserted, and algorithm.groups_per_step = {self._min_groups}: waits for producers"
        return (
            f"queue.samples_per_insert × inserts − samples would be {self._sum(inserted, sampled + n)}, and is at least "
            f"{self._lowest / _PARTS:g}: waits for producers"
        )

    def write_off(self, uses: int) -> float:
        """Samples that a group dropped after ``uses`` uses counts for, beyond those."""
        return max(0, self._rate - uses * _PARTS) / _PARTS

    def _balance(self, inserted: int, sampled: float) -> int:
        return self._rate * inserted - round(sampled * _PARTS)

    def _sum(self, inserted: int, sampled: float) -> str:
        return f"{self._rate / _PARTS:g} × {inserted} − {sampled:g} = {self._balance(inserted, sampled) / _PARTS:g}"


def _check_meaning(rate: float, least: int, buffer: float) -> None:
    rules = (
        ("queue.samples_per_insert", rate, "1e-6 or more and finite", math.isfinite(rate) and rate >= 1 / _PARTS),
        ("algorithm.groups_per_step", least, "1 or more", least >= 1),
        ("queue.error_buffer", buffer, "0 or more and finite", math.isfinite(buffer) and buffer >= 0),
    )
    for name, value, rule, kept in rules:
        if not kept:
            raise ConfigError(f"{name} is {rule}; met {value}")


def _check_liveness(rate: int, least: int, buffer: int, groups: int, max_uses: int) -> None:
    if rate > max_uses * _PARTS:
        raise ConfigError(
            f"queue.samples_per_insert is at most queue.max_uses = {max_uses}; met {rate / _PARTS:g}: a group would owe samples that it "
            "cannot give, and inserts would wait for them for ever. Lower the first or raise the second"
        )
    if 2 * buffer < rate + groups * _PARTS:
        raise ConfigError(
            f"queue.error_buffer >= (queue.samples_per_insert + groups a step) / 2 = ({rate / _PARTS:g} + {groups}) / 2 = "
            f"{(rate / _PARTS + groups) / 2:g}; met {buffer / _PARTS:g}: inserts and batches would wait for each other. Raise it"
        )
    if buffer < (groups - least) * rate:
        raise ConfigError(
            "a batch needs distinct groups, and inserts stop at min_groups + queue.error_buffer / queue.samples_per_insert = "
            f"{least} + {buffer / _PARTS:g} / {rate / _PARTS:g} = {least + buffer / rate:g}; met {groups} groups a step: "
            "raise queue.error_buffer"
        )
