"""Where a payload lies in the segment log, what the ledger claims of it, and what was found instead.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

__all__ = ["Claim", "Damaged", "Place"]


class Place(msgspec.Struct, frozen=True):
    """Payload bytes within a log segment: file number, first byte, number of bytes (its record's header lies before it).

    Example:
        >>> Place(segment=0, offset=320, length=1000).end
        1320
    """

    segment: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The byte after the payload's last."""
        return self.offset + self.length


Claim = tuple[Place, int, int, int]
"""What a ledger row says of a payload: place, ticket, attempt, xxh3-64."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A payload that cannot be used, and why."""

    ticket: int
    attempt: int
    reason: str
