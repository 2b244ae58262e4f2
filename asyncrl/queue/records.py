"""What the gate remembers of a live group, and what it hands on.

A group is live from admission until it is trained or dropped:

    generating → queued → leased → trained
        ↓  ↑        ↑________|  (return, fencing, a further use)
      reissue    any of generating, reissue, queued → dropped(reason)

Source: design note, section 4.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from asyncrl.queue.messages import Frontier
from asyncrl.trajectory import GroupMeta

__all__ = ["Blocked", "GateState", "GroupRecord", "GroupState", "Issue", "LeaseGranted", "ProducerMemory", "Settled"]


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
        used_at: steps that trained it, one for each committed use. settled_at: committed steps when it was settled, -1 before.
        priority: for ``queue.order=prioritised``; -1 until the learner set one.
        queued_s: when it was accepted, on the gate's clock.
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
    used_at: tuple[int, ...] = ()
    settled_at: int = -1
    priority: float = -1.0
    queued_s: float = 0.0
    meta: GroupMeta | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def uses(self) -> int:
        """Committed uses so far."""
        return len(self.used_at)

    @property
    def finished(self) -> bool:
        """Whether it has been sampled and may be leased."""
        return self.state is GroupState.QUEUED


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
    """A group that is no longer live, as it was last; ``reason`` is empty for a trained one."""

    record: GroupRecord
    reason: str

    @property
    def ticket(self) -> int:
        """Its ticket."""
        return self.record.ticket


class ProducerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What outlives the process about a producer; fields as in :class:`asyncrl.queue.fleet.ProducerRecord`."""

    version: int
    tokens_before: int
    tokens: int
    alive: bool


class GateState(msgspec.Struct, frozen=True, kw_only=True):
    """What a gate knows beside its live groups; with them, enough to go on after the death of the process.

    ``frontier`` is this shard's own. ``lease``: step and tickets of the batch that is out; ``overtakes`` it caused.
    ``attempts``: the attempt under which a ticket that a restore opened again will be issued.
    """

    frontier: Frontier
    next_ticket: int
    first_version: int
    reissued: int
    replaced_this_step: int
    incarnation: int
    last_commit: tuple[int, int] | None
    lease: tuple[int, ...]
    overtakes: dict[int, int]
    lag_consumed: dict[int, int]
    rewards: tuple[float, int]
    producers: dict[str, ProducerMemory]
    inserted: int
    sampled: float
    attempts: dict[int, int]
    stopping: bool = False
