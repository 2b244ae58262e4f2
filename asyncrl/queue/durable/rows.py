"""Rows of the ledger: what is known of a group and of a step, what one transaction changes, what a start finds.

Source: design note, section 4, "Durability", "Exactly once".
"""

from __future__ import annotations

import msgspec

from asyncrl.queue.durable.place import Place
from asyncrl.queue.messages import Frontier
from asyncrl.trajectory import GroupMeta

__all__ = ["SETTLED", "Changes", "GroupRow", "Snapshot", "StepRow"]

SETTLED = ("trained", "dropped")


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group as of its last transition.

    Attributes:
        state: generating, reissue, queued, leased, trained or dropped.
        version: the lowest version that may sample any token of it.
        overtaken: groups with a higher ticket leased before it; used_at: steps that trained it; priority: set by the learner, or -1.
        step: committed steps when it was settled, -1 while live; reason: why it was dropped; reasons: why attempts failed.
        checksum: xxh3-64 of the payload; lengths: bytes of its frames.
        place: in the log; segment: name of a shared-memory segment that holds it instead.
    """

    ticket: int
    attempt: int
    state: str
    producer: str = ""
    version: int = 0
    overtaken: int = 0
    used_at: tuple[int, ...] = ()
    priority: float = -1.0
    step: int = -1
    reason: str = ""
    reasons: tuple[str, ...] = ()
    meta: GroupMeta | None = None
    checksum: int = 0
    lengths: tuple[int, ...] = ()
    place: Place | None = None
    segment: str = ""

    @property
    def settled(self) -> bool:
        """Whether it was trained or dropped."""
        return self.state in SETTLED

    @property
    def has_payload(self) -> bool:
        """Whether a payload of it is kept anywhere."""
        return self.place is not None or bool(self.segment)

    def without_payload(self, **changes: object) -> GroupRow:
        """The row once its payload is freed, with further ``changes``."""
        return msgspec.structs.replace(self, **{"meta": None, "place": None, "segment": "", "lengths": (), "checksum": 0, **changes})


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step; ``frontier`` is that after the commit, ``committed_s`` unix time in seconds."""

    step: int
    incarnation: int
    frontier: Frontier
    committed_s: float


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """One transaction of the ledger.

    Attributes:
        groups: rows to insert or replace; steps: likewise.
        state: msgpack of small singletons, opaque here; empty means unchanged.
        forget: settled tickets whose payload is freed: their rows lose meta and place.
        abandoned: rows that a restore gave up; they leave ``groups`` unless named there again.
    """

    groups: tuple[GroupRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    state: bytes = b""
    forget: tuple[int, ...] = ()
    abandoned: tuple[GroupRow, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a ledger file holds at start.

    Attributes:
        live: groups neither trained nor dropped, in ticket order; kept: settled ones whose payload is kept; bare: settled ones
            without payload that a kept checkpoint may open again.
        steps: kept steps, ascending; state: as last written; branch: number of restores so far.
    """

    live: tuple[GroupRow, ...]
    kept: tuple[GroupRow, ...]
    steps: tuple[StepRow, ...]
    state: bytes
    branch: int
    bare: tuple[GroupRow, ...] = ()
