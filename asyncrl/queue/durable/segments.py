"""The segment log: payload of finished groups, appended to files that go when nothing in them is needed any more.

It consumes payload frames and produces places; it waits for the disk in :meth:`SegmentLog.append` and :meth:`SegmentLog.sync`
alone. A full disk is an error before anything is written: the broker holds producers back until payload is released. Files that are
kept to be written anew go before a record is refused for want of room.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError, DiskFull, QueueError
from asyncrl.queue.durable.disk import check_room, free_bytes_of, lock_folder, refusal, says_full, sync_folder
from asyncrl.queue.durable.place import Claim, Damaged, Place
from asyncrl.queue.durable.record import FILE_HEADER_BYTES, RECORD_HEADER_BYTES, FileHeader, aligned
from asyncrl.queue.durable.segment_file import SegmentFile, segment_numbers
from asyncrl.queue.durable.spares import Spares

__all__ = ["SegmentLog"]


class SegmentLog:
    """Writer of one shard's log; a second one on the same folder is refused.

    Args:
        segment_bytes: a new file is begun beyond this size; a larger record gets a file of its own.
        reserve_bytes: left free on the disk, for the ledger and for checkpoints.
        spare_segments: files without live payload that are kept to be written anew; more, and any left by an earlier process, go.
        spare_bytes: of these files together; as many segments of ``segment_bytes`` if not given.
        max_mapped: files kept open for reading; the one unused for longest is closed for another.
        free_bytes: tells the free bytes of a folder.

    Attributes:
        report: what :meth:`adopt` cut and removed.

    Raises:
        QueueError: another process writes there. DataError: the files belong to another run or shard.

    Example:
        >>> log = SegmentLog(folder, "r1", 0)                                              # doctest: +SKIP
        >>> place = log.append(7, 0, [b"ab", b"c"], checksum=payload_checksum(b"abc"))     # doctest: +SKIP
        >>> bytes(log.read(place))                                                         # doctest: +SKIP
        b'abc'
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        shard: int,
        *,
        segment_bytes: int = 256 << 20,
        reserve_bytes: int = 64 << 20,
        spare_segments: int = 4,
        spare_bytes: int | None = None,
        max_mapped: int = 128,
        free_bytes: Callable[[Path], int] = free_bytes_of,
    ) -> None:
        self.folder, self.run_id, self.shard = folder, run_id, shard
        self.report: list[str] = []
        self._segment_bytes, self._reserve_bytes, self._free_bytes = segment_bytes, reserve_bytes, free_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(folder)
        self._max_mapped = max_mapped
        self._mapped: OrderedDict[int, None] = OrderedDict()
        self._live: dict[int, dict[int, int]] = {}  # segment, payload offset: payload length
        self._active: SegmentFile | None = None
        self._dirty: set[int] = set()
        self._folder_dirty = False
        self._failure = ""
        try:
            self._files = {number: SegmentFile.open(folder, number) for number in segment_numbers(folder)}
            self._check_owner()
        except DataError:
            os.close(self._lock)
            raise
        self._spares = Spares(folder, spare_segments, spare_segments * segment_bytes if spare_bytes is None else spare_bytes)
        self._next = max(self._files, default=-1) + 1
        self._adopted = not self._files

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, spare ones included."""
        return sum(file.capacity for file in self._files.values()) + self._spares.num_bytes

    @property
    def num_segments(self) -> int:
        """Number of files that hold payload or are written."""
        return len(self._files)

    # writing

    def append(self, ticket: int, attempt: int, frames: Sequence[Any], checksum: int) -> Place:
        """Writes a payload, the frames one after another; ``checksum`` is its xxh3-64, and is not computed here.

        Raises:
            DiskFull: no room, or too little beyond the reserve; nothing of the record is kept.
            QueueError: the disk failed otherwise, or :meth:`adopt` was not called on a folder with files.
        """
        self._check_usable()
        length = sum(memoryview(frame).nbytes for frame in frames)
        needed = RECORD_HEADER_BYTES + aligned(length)
        growth = self._make_room(needed)
        try:
            file = self._file_for(needed)
            self._dirty.add(file.number)
            place = file.append(ticket, attempt, frames, checksum)
        except OSError as error:
            if says_full(error):  # a quota, of which the free bytes say nothing
                self._give_all()
            raise refusal(self.folder, error, self._free_bytes(self.folder), growth) from error
        self._live.setdefault(place.segment, {})[place.offset] = place.length
        return place

    def check_room(self, num_bytes: int) -> None:
        """Raises DiskFull if :meth:`append` would not take a payload of this size now; as there, files that can go make room first."""
        self._make_room(RECORD_HEADER_BYTES + aligned(num_bytes))

    def sync(self) -> None:
        """Waits until everything appended is on the disk; does nothing if it is.

        Raises:
            QueueError: the disk failed. The log takes nothing more, since what was written may be lost.
        """
        self._check_usable()
        try:
            for number in sorted(self._dirty):
                self._files[number].sync()
            if self._folder_dirty:
                sync_folder(self.folder)
                sync_folder(self.folder.parent)
        except OSError as error:
            self._failure = f"the segment log in {self.folder} could not be made durable: {error}; mend the disk and start the run again"
            raise QueueError(self._failure) from error
        self._dirty.clear()
        self._folder_dirty = False

    def release(self, place: Place) -> None:
        """A payload is needed no more; once is enough. Call it only after the ledger names the place no more."""
        payloads = self._live.get(place.segment)
        if payloads is None:
            return
        payloads.pop(place.offset, None)
        if not payloads:
            del self._live[place.segment]
            if self._active is None or place.segment != self._active.number:
                self._remove(place.segment)

    # reading

    def read(self, place: Place) -> memoryview:
        """The payload as a read-only view of the file; it stays valid after a release.

        Raises:
            QueueError: no such place, or its file is gone.
        """
        file = self._files.get(place.segment)
        if file is None:
            raise QueueError(f"{self.folder} has no segment {place.segment}: the payload at {place} was released", segment=place.segment)
        view = file.view(place)
        self._mapped[place.segment] = None
        self._mapped.move_to_end(place.segment)
        if len(self._mapped) > self._max_mapped:
            self._files[self._mapped.popitem(last=False)[0]].unmap()
        return view

    def path_of(self, place: Place) -> Path | None:
        """The file that holds a place, for another process of this host; None if there is none."""
        file = self._files.get(place.segment)
        return file.path if file is not None and place.end <= file.size else None

    def check(self, place: Place, ticket: int, attempt: int, checksum: int, *, payload: bool = True) -> str:
        """Why the payload at a place cannot be used, or ``""``; ``payload`` false looks at header and length alone."""
        file = self._files.get(place.segment)
        if file is None:
            return f"segment {place.segment} is missing in {self.folder}"
        return file.check(place, ticket, attempt, checksum, payload=payload)

    # start and end

    def adopt(self, live: Iterable[Claim], kept: Iterable[Claim] = ()) -> list[Damaged]:
        """Takes over what an earlier process left: keeps the payload that the ledger claims, cuts and removes the rest.

        ``live`` payload is read through; of ``kept`` payload, needed only by a restore, header and length are checked.
        Returns the claims that do not hold, in the order of the log.
        """
        damaged = []
        for claims, payload in ((live, True), (kept, False)):
            for place, ticket, attempt, checksum in sorted(claims, key=lambda claim: (claim[0].segment, claim[0].offset)):
                reason = self.check(place, ticket, attempt, checksum, payload=payload)
                if reason:
                    damaged.append(Damaged(ticket, attempt, reason))
                else:
                    self._live.setdefault(place.segment, {})[place.offset] = place.length
                self._next = max(self._next, place.segment + 1)
        newest = max(self._files, default=None)
        if newest is not None:
            self._cut(self._files[newest])
        for number in [number for number in self._files if number not in self._live]:
            self._remove(number)
        self._adopted = True
        return damaged

    def close(self) -> None:
        """Frees handles and the folder's lock; nothing is synced, and no file is removed."""
        for file in self._files.values():
            file.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _cut(self, file: SegmentFile) -> None:
        """Cuts the newest file behind its last claimed payload, and writes on there."""
        ends = [offset + aligned(length) for offset, length in self._live.get(file.number, {}).items()]
        end = max(ends, default=FILE_HEADER_BYTES)
        tail = file.tail(end)
        if tail:
            self.report.append(f"{file.path.name}: cut behind byte {end}: {tail}")
        if ends and end < self._segment_bytes:
            file.continue_at(end)
            self._active = file
            self._dirty.add(file.number)

    def _file_for(self, needed: int) -> SegmentFile:
        active = self._active
        if active is not None and self._fits(active, needed):
            return active
        spare = self._spares.take()
        header = FileHeader(run_id=self.run_id, shard=self.shard, number=self._next, recycled=spare is not None)
        file = SegmentFile.create(self.folder, header, spare)
        if active is not None:
            active.seal()
            if active.number not in self._live:
                self._remove(active.number)
        self._files[file.number] = self._active = file
        self._next += 1
        self._folder_dirty = True
        return file

    def _remove(self, number: int) -> None:
        self._retire(number, room=self._free_bytes(self.folder) >= self._reserve_bytes)

    def _retire(self, number: int, room: bool) -> None:
        self._dirty.discard(number)
        self._mapped.pop(number, None)
        self._spares.offer(self._files.pop(number), room=room)

    def _make_room(self, needed: int) -> int:
        """The growth for a record of ``needed`` bytes, once the disk has room for it.

        Raises:
            DiskFull: it has none, and nothing is left that could go.
        """
        while growth := self._growth(needed):
            try:
                check_room(self.folder, self._free_bytes(self.folder), growth, self._reserve_bytes)
                break
            except DiskFull:
                if not self._give_way(needed):
                    raise
        return growth

    def _give_way(self, needed: int) -> bool:
        """One step towards room for a record; false if there is none left to take."""
        dead = self._active is not None and self._active.number not in self._live
        if dead or self._spares.prefer(FILE_HEADER_BYTES + needed):  # a whole record in bytes that the disk has given before
            self._end_active()
            return True
        return self._spares.drop()

    def _give_all(self) -> None:
        if self._active is not None and self._active.number not in self._live:
            self._end_active()
        while self._spares.drop():
            pass

    def _end_active(self) -> None:
        """The next record goes to another file; the active one may be that, as a spare, if nothing in it is live."""
        active, self._active = self._active, None
        if active is not None:
            active.seal()
            if active.number not in self._live:
                self._retire(active.number, room=True)

    def _fits(self, file: SegmentFile, needed: int) -> bool:
        return file.size == FILE_HEADER_BYTES or file.size + needed <= self._segment_bytes

    def _growth(self, needed: int) -> int:
        """Bytes that the disk must give for a record of ``needed`` bytes."""
        if self._active is not None and self._fits(self._active, needed):
            return max(0, self._active.size + needed - self._active.capacity)
        return max(0, FILE_HEADER_BYTES + needed - self._spares.next_bytes)

    def _check_usable(self) -> None:
        if self._failure:
            raise QueueError(self._failure)
        if not self._adopted:
            raise QueueError(f"{self.folder} holds {len(self._files)} segments of an earlier process: adopt them first")

    def _check_owner(self) -> None:
        for file in self._files.values():
            try:
                header = file.header()
            except DataError as error:  # each record proves itself; a process killed at the wrong moment leaves such a file
                self.report.append(f"{file.path.name}: {error}")
                continue
            if (header.run_id, header.shard) != (self.run_id, self.shard):
                raise DataError(
                    f"{file.path} belongs to run {header.run_id!r}, shard {header.shard}; this is run {self.run_id!r}, "
                    f"shard {self.shard}: use a folder of its own for each"
                )
