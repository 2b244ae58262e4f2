"""Where a payload lies in the segment log.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

import msgspec

__all__ = ["Place"]


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
