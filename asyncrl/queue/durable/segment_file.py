"""One file of the segment log: append with scatter writes, read through a mapping, check against what the ledger says.

Usable by another process on a live or dead log (``SegmentFile.open``), which only reads.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError, QueueError
from asyncrl.queue.durable.disk import checksum_at, write_all
from asyncrl.queue.durable.place import Place
from asyncrl.queue.durable.record import ALIGNMENT, FILE_HEADER_BYTES, RECORD_HEADER_BYTES, FileHeader, RecordHeader, aligned

__all__ = ["SegmentFile", "segment_numbers"]

_ZEROS = bytes(ALIGNMENT)


def segment_numbers(folder: Path) -> list[int]:
    """Numbers of the segment files in a folder, ascending."""
    names = (path.name.removeprefix("segment-").removesuffix(".log") for path in folder.glob("segment-*.log"))
    return sorted(int(name) for name in names if name.isdigit())


class SegmentFile:
    """A segment of known size; the last one of a log is written, the others are sealed.

    Attributes:
        size: bytes of whole records, the file's header included; what is written later goes there.
        capacity: bytes of the file; more than ``size`` in one that was recycled.
    """

    def __init__(self, path: Path, number: int, size: int, capacity: int) -> None:
        self.path, self.number, self.size, self.capacity = path, number, size, capacity
        self._lent = False
        self._fd: int | None = None
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls, folder: Path, header: FileHeader, spare: SegmentFile | None = None) -> SegmentFile:
        """A segment open for writing, with its header: a new file, or a retired one. Raises OSError and leaves nothing behind."""
        file = cls(_path(folder, header.number), header.number, 0, spare.capacity if spare else 0)
        if spare is not None:
            spare.path.rename(file.path)
        file._fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC | (0 if spare else os.O_CREAT | os.O_EXCL), 0o600)
        try:
            file._write([memoryview(header.pack())])
        except OSError:
            file.unlink()
            raise
        return file

    @classmethod
    def open(cls, folder: Path, number: int) -> SegmentFile:
        """A file that is there, sealed.

        Raises:
            DataError: there is none of this number.
        """
        path = _path(folder, number)
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing: it was removed from outside, or the disk lost it", segment=number) from error
        return cls(path, number, size, size)

    def header(self) -> FileHeader:
        """Whose file it is. Raises DataError if that cannot be read."""
        with self._opened() as fd:
            return FileHeader.parse(os.pread(fd, FILE_HEADER_BYTES, 0))

    # writing

    def append(self, ticket: int, attempt: int, frames: Sequence[Any], checksum: int) -> Place:
        """Writes a record at the end; on an OSError the file is as it was before."""
        views = [view for frame in frames if (view := memoryview(frame).cast("B")).nbytes]
        length = sum(view.nbytes for view in views)
        place = Place(self.number, self.size + RECORD_HEADER_BYTES, length)
        header = RecordHeader(
            ticket=ticket, attempt=attempt, segment=self.number, offset=place.offset, length=length, checksum=checksum
        ).pack()
        self._write([memoryview(header), *views, memoryview(_ZEROS)[: aligned(length) - length]])
        return place

    def continue_at(self, size: int) -> None:
        """Cuts the file to ``size`` and opens it for writing there."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.size = self.capacity = size

    def sync(self) -> None:
        """Waits until its bytes are on the disk. Raises OSError."""
        with self._opened() as fd:
            os.fdatasync(fd)

    def seal(self) -> None:
        """Nothing more will be written."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def retire(self) -> bool:
        """Makes it a spare file to be written anew; false if it is gone, or while a view of it is in use, for which it must not change.

        Pages and blocks that are there cost a write a quarter of what new ones cost.
        """
        self.seal()
        self.unmap()
        if self._lent:
            return False
        spare = self.path.with_name(f"spare-{self.number:08d}.log")
        try:
            self.path.rename(spare)
        except FileNotFoundError:
            return False
        self.path = spare
        return True

    def unlink(self) -> None:
        """Removes the file; views handed out stay valid until they are dropped."""
        self.seal()
        self.unmap()
        self.path.unlink(missing_ok=True)

    # reading

    def view(self, place: Place) -> memoryview:
        """The payload, read-only and without a copy.

        Raises:
            QueueError: the place lies beyond the end, or the file cannot be opened any more.
        """
        if place.end > self.size:
            raise QueueError(f"{self.path} has {self.size} bytes; met a place of bytes {place.offset} to {place.end}", segment=self.number)
        if self._map is None or place.end > len(self._map):
            self.unmap()
            try:
                with self._opened() as fd:
                    self._map = mmap.mmap(fd, self.capacity, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # ValueError: it is shorter than it was
                raise QueueError(f"the payload at {place} is lost: {self.path} cannot be read: {error}", segment=self.number) from error
        return memoryview(self._map)[place.offset : place.end]

    def unmap(self) -> None:
        """Frees the handle that reading took; the next view opens the file again. Views handed out stay valid."""
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # a view is still being sent; the mapping goes with it
                self._lent = True
            self._map = None

    def check(self, place: Place, ticket: int, attempt: int, checksum: int, *, payload: bool = True) -> str:
        """Why the bytes at a place are not the group's payload, or ``""``; with ``payload`` false only header and length are looked at.

        Reads the file instead of a mapping: what the disk cannot read is a reason here, and would end the process there.
        """
        expected = RecordHeader(
            ticket=ticket, attempt=attempt, segment=place.segment, offset=place.offset, length=place.length, checksum=checksum
        )
        try:
            with self._opened() as fd:
                met = RecordHeader.parse(os.pread(fd, RECORD_HEADER_BYTES, place.offset - RECORD_HEADER_BYTES))
                if met != expected:
                    return f"header damaged: the ledger says {expected}, the file {met}"
                if place.end > (size := os.fstat(fd).st_size):
                    return f"cut short: {size - place.offset} of {place.length} bytes are there"
                found = checksum_at(fd, place.offset, place.length) if payload else checksum
        except (DataError, OSError) as error:
            return str(error)
        return "" if found == checksum else f"checksum differs: xxh3-64 was {checksum:#018x} and is {found:#018x}"

    def tail(self, start: int) -> str:
        """Says what was written from byte ``start`` on, or ``""``: whole records, a torn one, bytes of neither.

        What an earlier segment left in a recycled file is not counted.
        """
        names, position, torn = [], start, ""
        with self._opened() as fd:
            while record := self._own_record(fd, position):
                name = f"ticket {record.ticket} attempt {record.attempt}"
                place = Place(record.segment, record.offset, record.length)
                if self.check(place, record.ticket, record.attempt, record.checksum):
                    torn = f"a torn record ({name})"
                    break
                names.append(name)
                position = record.offset + aligned(record.length)
        listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        whole = f"{len(names)} whole records that no ledger row needs ({listed})" if names else ""
        rest = f"{self.size - position} bytes of no record" if self.size > position and not torn and not self._recycled() else ""
        return ", ".join(part for part in (whole, torn, rest) if part)

    def close(self) -> None:
        """Frees handles; the file stays."""
        self.seal()
        self.unmap()

    def _write(self, buffers: list[memoryview]) -> None:
        start, total = self.size, sum(buffer.nbytes for buffer in buffers)
        assert self._fd is not None, "a sealed segment is not written"
        try:
            write_all(self._fd, buffers, start)
        except OSError:
            with contextlib.suppress(OSError):  # the next record overwrites what is left, and a start cuts it
                os.ftruncate(self._fd, self.capacity)
            raise
        self.size = start + total
        self.capacity = max(self.capacity, self.size)

    def _own_record(self, fd: int, position: int) -> RecordHeader | None:
        try:
            record = RecordHeader.parse(os.pread(fd, RECORD_HEADER_BYTES, position))
        except DataError:
            return None
        return record if (record.segment, record.offset) == (self.number, position + RECORD_HEADER_BYTES) else None

    def _recycled(self) -> bool:
        try:
            return self.header().recycled
        except DataError:
            return False

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        if self._fd is not None:
            yield self._fd
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


def _path(folder: Path, number: int) -> Path:
    return folder / f"segment-{number:08d}.log"
