"""Payload of finished groups: where it lies, and what goes out for it.

A payload came inline, names a shared-memory segment, or stays with its producer. With a log it is appended there before its group is
accepted, and what came inline is served from the log, or read in its files; without one it stays in memory. The bytes are not looked at
here: their checksum goes from producer to consumer, and whoever reads them checks it.

Source: design note, section 4.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import DiskFull, QueueError, SchemaError
from asyncrl.queue.durable.place import Place
from asyncrl.queue.durable.segments import SegmentLog
from asyncrl.queue.messages import PayloadItem, PutItem
from asyncrl.queue.shm import Mappings, SegmentKeeper

__all__ = ["Payload", "PayloadStore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One group's payload: in ``frames``, in a shared-memory ``segment``, under that name at ``source``, or at a ``place`` of the log."""

    checksum: int
    lengths: tuple[int, ...]
    frames: tuple[Any, ...] = ()
    segment: str = ""
    source: str = ""
    place: Place | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(self.lengths)


log = logging.getLogger(__name__)
LOST = Payload(checksum=0, lengths=())


class PayloadStore:
    """Payloads by ticket, kept from the put until no restore can ask for them.

    Args:
        run_id: of the segments that may be named.
        log: None keeps inline payload in memory.
    """

    def __init__(self, run_id: str, log: SegmentLog | None) -> None:
        self.log = log
        self._payloads: dict[int, Payload] = {}
        self._keeper = SegmentKeeper(run_id)
        self._mappings = Mappings(run_id)
        self._released: defaultdict[str, list[str]] = defaultdict(list)
        self._freed: list[Place] = []
        self._at: defaultdict[str, set[int]] = defaultdict(set)
        self._gone: set[str] = set()

    def __len__(self) -> int:
        return len(self._payloads)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._payloads

    @property
    def log_bytes(self) -> int:
        """Bytes of the log on disk."""
        return self.log.num_bytes if self.log is not None else 0

    def payload(self, ticket: int) -> Payload | None:
        """Where a ticket's payload lies."""
        return self._payloads.get(ticket)

    def keep(self, ticket: int, attempt: int, item: PutItem, frames: Sequence[Any]) -> None:
        """Takes a payload in.

        Raises:
            DiskFull: the log has no room; nothing is kept.
            QueueError, SchemaError: the segment is not there, or is none of this run.
        """
        if item.source:
            self._check_source(item)
        elif item.segment:
            self._keeper.check(item.segment, sum(item.lengths))
        place = None
        if self.log is not None:
            pieces = [self._mappings.view(item.segment, sum(item.lengths))] if item.segment else frames
            place = self.log.append(ticket, attempt, pieces, item.checksum)
        self.settle(ticket, retain=False)  # of an attempt that failed in this very burst
        self._payloads[ticket] = Payload(
            checksum=item.checksum,
            lengths=item.lengths if place is None or item.segment else (sum(item.lengths),),
            frames=() if item.segment or place is not None else tuple(frames),
            segment=item.segment,
            source=item.source,
            place=place,
        )
        if item.source:
            self._at[_owner(item.segment)].add(ticket)

    def kept_by(self) -> dict[str, tuple[int, ...]]:
        """Tickets whose payload stayed with its producer, by the producer's name; under none those of a life that is over."""
        return {owner: tuple(tickets) for owner, tickets in self._at.items()}

    def refusal(self, num_bytes: int) -> str:
        """Why a payload of this size cannot be kept now, empty if it can."""
        if self.log is None:
            return ""
        try:
            self.log.check_room(num_bytes)
        except DiskFull as error:
            return str(error)
        return ""

    def restore(self, ticket: int, payload: Payload) -> None:
        """A payload that an earlier process kept."""
        if payload.segment and not self._there(payload):
            payload = Payload(checksum=payload.checksum, lengths=(payload.num_bytes,), place=payload.place)
        if payload.place is not None or payload.segment:
            self._payloads[ticket] = payload

    def settle(self, ticket: int, retain: bool) -> None:
        """The group is settled: its segment goes back to its producer, and unless ``retain`` the log may forget it too."""
        payload = self._payloads.pop(ticket, None)
        if payload is None:
            return
        if payload.segment:
            self._release(payload.segment)
        if payload.source:
            self._forget_source(ticket, _owner(payload.segment))
        if payload.place is None:
            return
        if retain:
            self._payloads[ticket] = Payload(checksum=payload.checksum, lengths=(payload.num_bytes,), place=payload.place)
        else:
            self._freed.append(payload.place)

    def unkept(self, item: PutItem, sender: str) -> None:
        """A put that was not accepted: the sender may write its own segment again, unless the accepted attempt lies in it."""
        own = self._keeper.is_name(item.segment) and _owner(item.segment) == sender
        if own and all(payload.segment != item.segment for payload in self._payloads.values()):
            self._released[sender].append(item.segment)

    def take_released(self, owner: str) -> tuple[str, ...]:
        """Segments of a producer that it may write again."""
        return tuple(self._released.pop(owner, ()))

    def owner_gone(self, owner: str, alone: bool) -> None:
        """A producer is gone: its segments are removed, those of live groups once they are settled.

        One that was merely slow is told of them when it speaks again, and gives them up.

        Args:
            alone: no other broker serves segments of this run, so that what lies in none of the groups here is nobody's.
        """
        for name in self._released.get(owner, ()):
            self._keeper.unlink(name)
        live = {payload.segment for payload in self._payloads.values() if payload.segment and _owner(payload.segment) == owner}
        if live:
            self._gone.add(owner)
        if alone:
            self._keeper.sweep(live, owner)
        self._mappings.forget_gone()

    def owner_new(self, owner: str, alone: bool) -> None:
        """A new process has this name: the one before is gone, and what was removed may be named anew."""
        self.owner_gone(owner, alone)
        self._released.pop(owner, None)
        self._gone.discard(owner)
        if owner in self._at:
            self._at[""] |= self._at.pop(owner)

    def owner_here(self, owner: str) -> None:
        """A producer speaks: segments go back to it again."""
        self._gone.discard(owner)

    def release_freed(self) -> None:
        """Lets the log drop what was freed; call it when the ledger names those places no more."""
        for place in self._freed:
            assert self.log is not None
            self.log.release(place)
        self._freed = []

    def fetch(self, tickets: Sequence[int], files: bool = False) -> tuple[tuple[PayloadItem, ...], list[Any]]:
        """Descriptions and inline frames of payloads, in the order asked; a description without ``lengths`` says that there is none.

        Args:
            files: payload in the log is described by its file, and not handed out.
        """
        items: list[PayloadItem] = []
        frames: list[Any] = []
        for ticket in tickets:
            payload = self._payloads.get(ticket, LOST)
            if payload.segment and payload.place is not None and not self._there(payload):
                payload = Payload(checksum=payload.checksum, lengths=(payload.num_bytes,), place=payload.place)
            file, offset, pieces = "", 0, payload.frames
            if payload.place is not None and not payload.segment:
                file, offset = self._file_of(payload.place) if files else ("", 0)
                pieces = () if file else self._from_log(ticket, payload.place)
                payload = payload if file or pieces else LOST
            items.append(
                PayloadItem(
                    ticket=ticket,
                    checksum=payload.checksum,
                    lengths=payload.lengths,
                    segment=payload.segment,
                    source=payload.source,
                    file=file,
                    offset=offset,
                )
            )
            frames.extend(pieces)
        return tuple(items), frames

    def close(self, *, sweep: bool = True) -> None:
        """The broker ends: files of the log stay, and segments in shared memory too without ``sweep``, since others may serve them."""
        self._mappings.close()
        if sweep:
            self._keeper.sweep(())
        if self.log is not None:
            self.log.close()

    def _release(self, segment: str) -> None:
        owner = _owner(segment)
        self._released[owner].append(segment)
        if owner in self._gone:
            self._keeper.unlink(segment)
            self._mappings.forget_gone()

    def _from_log(self, ticket: int, place: Place) -> tuple[memoryview, ...]:
        """The payload in the log; nothing if it was lost there: the learner then gives its group back, and it is sampled again."""
        assert self.log is not None
        try:
            return (self.log.read(place),)
        except QueueError as error:
            log.warning("ticket %d: %s", ticket, error)
            return ()

    def _file_of(self, place: Place) -> tuple[str, int]:
        """Path and offset of a payload in the log; none when its file is gone."""
        assert self.log is not None
        path = self.log.path_of(place)
        return (str(path.absolute()), place.offset) if path is not None else ("", 0)

    def _check_source(self, item: PutItem) -> None:
        if self.log is not None:
            raise SchemaError(
                f"a queue with a log takes the payload itself; met one that stays at {item.source}: set queue.payload=inline or shm"
            )
        self._keeper.check_name(item.segment)

    def _forget_source(self, ticket: int, owner: str) -> None:
        for name in (owner, ""):
            self._at[name].discard(ticket)
            if not self._at[name]:
                del self._at[name]

    def _there(self, payload: Payload) -> bool:
        try:
            self._keeper.check(payload.segment, payload.num_bytes)
        except QueueError:
            return False
        return True


def _owner(segment: str) -> str:
    """The producer that a segment's name ``asyncrl-RUN.q.OWNER.NUMBER`` tells; empty for any other text."""
    parts = segment.rsplit(".", 2)
    return parts[1] if len(parts) == 3 else ""
