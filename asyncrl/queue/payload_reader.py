"""Payload at the rank that trains it: where it is found, checksum, decoding, and whether it is what the metadata said.

Consumes descriptions and frames of :class:`asyncrl.queue.messages.Payloads`; produces groups, and for those that cannot be used the reason.

Source: design note, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import AsyncRLError, ConfigError, QueueError, SchemaError
from asyncrl.queue.messages import PayloadItem, Payloads
from asyncrl.queue.payload import checksum
from asyncrl.queue.puller import Puller
from asyncrl.queue.shm import Mappings
from asyncrl.trajectory import GroupMeta, TrajectoryGroup, decode_group

__all__ = ["PayloadReader"]


class PayloadReader:
    """Reads payloads of one run.

    Args:
        run_id: of the shared-memory segments that may be named.
        puller: asks producers for payload that stayed with them; None where there is none.
    """

    def __init__(self, run_id: str, puller: Puller | None = None) -> None:
        self._mappings = Mappings(run_id)
        self._puller = puller

    def reaches(self, announced: Payloads) -> bool:
        """Whether the files of the log that are named can be read here."""
        return all(self._mappings.reaches(item.file) for item in announced.groups if item.file)

    def read(
        self, announced: Payloads, frames: Sequence[Any], expected: Mapping[int, GroupMeta]
    ) -> tuple[dict[int, TrajectoryGroup], list[tuple[int, int, str]]]:
        """Groups by ticket, and (ticket, attempt, reason) of those that cannot be used.

        Args:
            expected: metadata of the lease, by ticket.
        """
        if self._puller is not None:
            self._puller.begin()
        groups: dict[int, TrajectoryGroup] = {}
        damaged: list[tuple[int, int, str]] = []
        position = 0
        for item in announced.groups:
            mine = frames[position : position + item.num_frames]
            position += item.num_frames
            meta = expected[item.ticket]
            try:
                groups[item.ticket] = self._group(item, mine, meta)
            except ConfigError:
                raise
            except AsyncRLError as error:
                damaged.append((item.ticket, meta.attempt, str(error)))
        return groups, damaged

    def forget_gone(self) -> None:
        """See :meth:`Mappings.forget_gone`."""
        self._mappings.forget_gone()

    def close(self) -> None:
        """Forgets segments and producers."""
        self._mappings.close()
        if self._puller is not None:
            self._puller.close()

    def pieces(self, item: PayloadItem, frames: Sequence[Any]) -> Sequence[Any]:
        """The bytes of a payload, put end to end, from where they lie or out of ``frames``; their checksum is that of the producer.

        They are valid until the group is committed or returned.

        Raises:
            QueueError: they cannot be had. SchemaError: the checksum differs.
        """
        if not item.lengths:
            raise SchemaError(f"the payload of ticket {item.ticket} was lost")
        pieces = self._found(item, frames)
        met = checksum(pieces)
        if met != item.checksum:
            raise SchemaError(f"payload of ticket {item.ticket} has xxh3-64 {item.checksum:#x}; met {met:#x}", ticket=item.ticket)
        return pieces

    def _found(self, item: PayloadItem, frames: Sequence[Any]) -> Sequence[Any]:
        length = sum(item.lengths)
        if item.source:
            if self._puller is None:
                raise QueueError(f"the payload of ticket {item.ticket} stayed at {item.source}, and nobody is there to ask for it")
            return self._puller.pull(item)
        if item.segment:
            return [self._mappings.view(item.segment, length)]
        return [self._mappings.view_file(item.file, item.offset, length)] if item.file else frames

    def _group(self, item: PayloadItem, frames: Sequence[Any], meta: GroupMeta) -> TrajectoryGroup:
        group = decode_group(self.pieces(item, frames))
        met = group.meta(payload_bytes=sum(item.lengths))
        if met != meta:
            names = [name for name in GroupMeta.__slots__ if getattr(met, name) != getattr(meta, name)]
            raise SchemaError(
                f"payload of ticket {item.ticket} is what its metadata says; they differ in {', '.join(names)}", ticket=item.ticket
            )
        return group
