"""Payload at the rank that trains it: checksum, decoding, and whether it is what the metadata said.

Consumes descriptions and frames of :class:`asyncrl.queue.messages.Payloads`; produces groups, and for those that cannot be used the reason.

Source: design note, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import AsyncRLError, SchemaError
from asyncrl.queue.messages import PayloadItem, Payloads
from asyncrl.queue.payload import checksum
from asyncrl.queue.shm import Mappings
from asyncrl.trajectory import GroupMeta, TrajectoryGroup, decode_group

__all__ = ["PayloadReader"]


class PayloadReader:
    """Reads payloads of one run.

    Args:
        run_id: of the shared-memory segments that may be named.
    """

    def __init__(self, run_id: str) -> None:
        self._mappings = Mappings(run_id)

    def read(
        self, announced: Payloads, frames: Sequence[Any], expected: Mapping[int, GroupMeta]
    ) -> tuple[dict[int, TrajectoryGroup], list[tuple[int, int, str]]]:
        """Groups by ticket, and (ticket, attempt, reason) of those that cannot be used.

        Args:
            expected: metadata of the lease, by ticket.
        """
        groups: dict[int, TrajectoryGroup] = {}
        damaged: list[tuple[int, int, str]] = []
        position = 0
        for item in announced.groups:
            number = 0 if item.segment else len(item.lengths)
            mine = frames[position : position + number]
            position += number
            meta = expected[item.ticket]
            try:
                groups[item.ticket] = self._group(item, mine, meta)
            except AsyncRLError as error:
                damaged.append((item.ticket, meta.attempt, str(error)))
        return groups, damaged

    def close(self) -> None:
        """Forgets the segments."""
        self._mappings.close()

    def _group(self, item: PayloadItem, frames: Sequence[Any], meta: GroupMeta) -> TrajectoryGroup:
        if not item.lengths:
            raise SchemaError(f"the payload of ticket {item.ticket} was lost")
        pieces = [self._mappings.view(item.segment, sum(item.lengths))] if item.segment else frames
        found = checksum(pieces)
        if found != item.checksum:
            raise SchemaError(f"payload of ticket {item.ticket} has xxh3-64 {item.checksum:#x}; met {found:#x}", ticket=item.ticket)
        group = decode_group(pieces)
        met = group.meta(payload_bytes=sum(item.lengths))
        if met != meta:
            names = [name for name in GroupMeta.__slots__ if getattr(met, name) != getattr(meta, name)]
            raise SchemaError(
                f"payload of ticket {item.ticket} is what its metadata says; they differ in {', '.join(names)}", ticket=item.ticket
            )
        return group
