"""What the gate remembers of a live group, and what it hands on.

A group is live from admission until it is trained or dropped:

    generating → queued → leased → trained
        ↓  ↑        ↑________|  (return, fencing)
      reissue    any of generating, reissue, queued → dropped(reason)

Source: design note, section 4.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from asyncrl.trajectory import GroupMeta

__all__ = ["Blocked", "GroupRecord", "GroupState", "Issue", "LeaseGranted", "Settled"]


class GroupState(enum.StrEnum):
    """Where a live group is."""

    GENERATING = "generating"
    REISSUE = "reissue"
    QUEUED = "queued"
    LEASED = "leased"


@dataclass(slots=True, kw_only=True)
class GroupRecord:
    """One live group.

    Attributes:
        attempt: how often the ticket was issued before the present issue.
        version: the lowest version that may sample any token of it; in lockstep the only one.
        overtaken: groups with a higher ticket that were leased or trained while this one was neither.
        meta: of the accepted group, once queued.
        reasons: why earlier attempts failed.
    """

    ticket: int
    producer: str
    version: int
    deadline_s: float
    attempt: int = 0
    state: GroupState = GroupState.GENERATING
    overtaken: int = 0
    meta: GroupMeta | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it has been sampled and may be leased."""
        return self.state is GroupState.QUEUED

    @property
    def unleased(self) -> bool:
        """Whether it can still be overtaken."""
        return self.state is not GroupState.LEASED


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """Leave to sample a group: ``not_before_version``, and in lockstep ``exact_version`` (else -1)."""

    ticket: int
    attempt: int
    not_before_version: int
    exact_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Not now, and why, with the numbers.

    ``advance``: in lockstep, nothing will ask for the producer's version any more. ``ended``: never again.
    """

    reason: str
    advance: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGranted:
    """Groups of one training step in training order (``_G``)."""

    step: int
    groups_G: tuple[GroupMeta, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A group that is no longer live; ``reason`` is empty for a trained one. ``reasons`` tell why attempts failed."""

    ticket: int
    reason: str
    reasons: tuple[str, ...] = ()
