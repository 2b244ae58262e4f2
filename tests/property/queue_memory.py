"""Log and ledger of one broker in memory: the rows go through the ledger's codecs, and nothing waits for a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.queue.durable.place import Place
from asyncrl.queue.durable.row_codec import decode_group_row, encode_group_row, encode_payload
from asyncrl.queue.durable.rows import Changes, GroupRow, Snapshot

__all__ = ["MemoryLedger", "MemoryLog"]


class MemoryLog:
    """Stands for :class:`asyncrl.queue.durable.segments.SegmentLog`; ``places`` holds what was not released."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self.places = {place.offset for place in places}
        self._next = max(self.places, default=-1) + 1

    @property
    def num_bytes(self) -> int:
        return len(self.places)

    def append(self, ticket: int, attempt: int, frames: Sequence[Any], checksum: int) -> Place:
        place = Place(segment=0, offset=self._next, length=1)
        self._next += 1
        self.places.add(place.offset)
        return place

    def release(self, place: Place) -> None:
        self.places.remove(place.offset)


class MemoryLedger:
    """Stands for :class:`asyncrl.queue.durable.ledger_file.LedgerFile`."""

    def __init__(self, other: MemoryLedger | None = None) -> None:
        self.state = other.state if other else b""
        self.groups = dict(other.groups) if other else {}
        self.payloads = dict(other.payloads) if other else {}

    def write(self, changes: Changes) -> None:
        for row in changes.abandoned:
            self.groups.pop(row.ticket, None)
            self.payloads.pop(row.ticket, None)
        for row in changes.groups:
            self.groups[row.ticket] = (row.state, row.step, encode_group_row(row))
            if row.meta is not None:
                self.payloads[row.ticket] = encode_payload(row)
            else:
                self.payloads.pop(row.ticket, None)
        for ticket in changes.forget:
            self.payloads.pop(ticket, None)
        self.state = changes.state or self.state

    def begin_branch(self, steps: int, changes: Changes) -> int:
        self.write(changes)
        return 0

    def steps_kept_from(self, steps: int) -> None:
        for ticket in [row.ticket for row in self.rows() if row.settled and row.step < steps]:
            del self.groups[ticket]
            self.payloads.pop(ticket, None)

    def rows(self) -> list[GroupRow]:
        return [decode_group_row(ticket, *self.groups[ticket], self.payloads.get(ticket)) for ticket in sorted(self.groups)]

    def load(self) -> Snapshot:
        rows = self.rows()
        return Snapshot(
            live=tuple(row for row in rows if not row.settled),
            kept=tuple(row for row in rows if row.settled and row.has_payload),
            bare=tuple(row for row in rows if row.settled and not row.has_payload),
            steps=(),
            state=self.state,
            branch=0,
        )
