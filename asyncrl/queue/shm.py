"""Payload in shared memory of one host: only a name and a length pass the broker.

A producer's :class:`Arena` copies a group into a segment, a file in /dev/shm of which the broker gets name and length; a consumer's
:class:`Mappings` views it without a copy; the broker's :class:`SegmentKeeper` checks and removes. A segment is written by its producer
alone, and again only after the broker said that its group is settled (``recycle``): recycling keeps its pages, so that a
steady run neither faults nor frees any. A segment is as large as its size class; tmpfs holds only the pages that were written.

Source: design note, section 4.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import stat
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.errors import QueueError, SchemaError

__all__ = ["SHM_FOLDER", "Arena", "Mappings", "Segment", "SegmentKeeper", "size_class"]

SHM_FOLDER = Path("/dev/shm")
_SMALLEST_BYTES = 1 << 16
_HUGE_PAGE_BYTES = 1 << 21
_MADV_COLLAPSE = 25  # Linux 6.1; the mmap module of Python 3.12 has no name for it
_PIECE_BYTES = 1 << 17
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a payload lies: file name in the folder, its bytes, and their XXH3-64."""

    name: str
    length: int
    checksum: int


@dataclass(slots=True)
class _Own:
    """A segment of this producer; ``touched`` bytes of it hold pages."""

    name: str
    view: mmap.mmap = field(repr=False)
    touched: int = 0


def size_class(num_bytes: int) -> int:
    """The power of two, at least 64 KiB, that holds ``num_bytes``."""
    return max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())


class Arena:
    """A producer's segments.

    Args:
        run_id, owner: parts of every name; letters, digits, ``_`` and ``-``.
        limit_bytes: pages that the segments may hold together, in use or waiting to be used again.
        folder: where they lie; another one only in tests.
    """

    def __init__(self, run_id: str, owner: str, limit_bytes: int, *, folder: Path = SHM_FOLDER) -> None:
        _pattern(run_id)
        if not re.fullmatch(r"[\w-]+", owner, re.ASCII):
            raise QueueError(f"the owner of segments has letters, digits, _ and -; met {owner!r}")
        if not folder.is_dir():
            raise QueueError(f"payload in shared memory needs {folder}, which is missing on this host: use inline payload")
        self._prefix = f"asyncrl-{run_id}.q.{owner}."
        self._folder = folder
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._numbers = itertools.count()
        self._used: dict[str, _Own] = {}
        self._free: defaultdict[int, list[_Own]] = defaultdict(list)

    @property
    def num_used(self) -> int:
        """Segments whose groups aren't settled."""
        return len(self._used)

    def write(self, frames: Sequence[Any]) -> Segment:
        """Copies frames into a segment and sums them up in the same pass.

        Raises:
            QueueError: the arena is full, or the host is out of shared memory.
        """
        views = [memoryview(frame).cast("B") for frame in frames]
        length = sum(view.nbytes for view in views)
        own = self._take(length)
        state = xxhash.xxh3_64()
        position = 0
        for piece in _pieces(views):
            state.update(piece)
            own.view[position : position + piece.nbytes] = piece
            position += piece.nbytes
        self._used[own.name] = own
        return Segment(own.name, length, state.intdigest())

    def recycle(self, names: Iterable[str]) -> None:
        """The groups in these segments are settled: they may be written again. Unknown names change nothing."""
        for name in names:
            own = self._used.pop(name, None)
            if own is not None:
                self._free[len(own.view)].append(own)

    def close(self, unlink: bool) -> None:
        """Unmaps all. ``unlink`` removes the files too: only when nobody will read them any more."""
        for own in [*self._used.values(), *itertools.chain.from_iterable(self._free.values())]:
            self._drop(own, unlink)
        self._used.clear()
        self._free.clear()

    def _take(self, length: int) -> _Own:
        """A free or new segment with pages for ``length`` bytes, all of them there before the first one is written."""
        capacity = size_class(length)
        free = self._free[capacity]
        own = max(free, key=lambda one: one.touched, default=None)
        growth = max(0, _pages(length) - (own.touched if own else 0))
        self._shrink(growth, spare=own)
        if self.num_bytes + growth > self.limit_bytes:
            raise QueueError(
                f"shared memory of this producer is limited to {self.limit_bytes} bytes; {self.num_bytes} are in {self.num_used} groups "
                f"that aren't settled and {length} are wanted: wait for a commit, raise the limit, or lower queue.max_queued_mib",
                num_bytes=length,
            )
        if own is None:
            own = self._create(capacity)
        else:
            free.remove(own)
        self._reserve(own, length, growth)
        return own

    def _shrink(self, growth: int, *, spare: _Own | None) -> None:
        """Gives up free segments of other sizes until ``growth`` fits."""
        for free in self._free.values():
            for own in [one for one in free if one is not spare]:
                if self.num_bytes + growth <= self.limit_bytes:
                    return
                free.remove(own)
                self.num_bytes -= own.touched
                self._drop(own, unlink=True)

    def _create(self, capacity: int) -> _Own:
        while True:
            name = f"{self._prefix}{next(self._numbers)}"
            try:
                handle = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
                break
            except FileExistsError:
                continue  # left by an earlier process of this name: the broker decides when it goes
        try:
            os.ftruncate(handle, capacity)
            view = mmap.mmap(handle, capacity)
        finally:
            os.close(handle)
        return _Own(name, view)

    def _reserve(self, own: _Own, length: int, growth: int) -> None:
        """Allocates the pages now: a mapping that finds no page later is a SIGBUS and not an error."""
        if not growth:
            return
        handle = os.open(self._folder / own.name, os.O_RDWR | _FLAGS)
        try:
            os.posix_fallocate(handle, 0, _pages(length))
        except OSError as error:
            self.num_bytes -= own.touched
            self._drop(own, unlink=True)
            raise QueueError(
                f"{self._folder} has no room for a payload of {length} bytes ({error.strerror}): enlarge it, or use inline payload",
                num_bytes=length,
            ) from error
        finally:
            os.close(handle)
        with contextlib.suppress(OSError):  # huge pages are a gain where the host gives them, no need
            if length >= _HUGE_PAGE_BYTES:
                own.view.madvise(_MADV_COLLAPSE, 0, length // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
        own.touched += growth
        self.num_bytes += growth

    def _drop(self, own: _Own, unlink: bool) -> None:
        own.view.close()
        if unlink:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / own.name)


class Mappings:
    """A consumer's read-only views of segments, kept by name; the ones unused for longest go beyond ``max_mapped``."""

    def __init__(self, run_id: str, *, max_mapped: int = 1024, folder: Path = SHM_FOLDER) -> None:
        self._pattern = _pattern(run_id)
        self._folder = folder
        self._max_mapped = max_mapped
        self._known: OrderedDict[str, tuple[tuple[int, int], mmap.mmap]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def view(self, name: str, length: int) -> memoryview:
        """The first ``length`` bytes of a segment, read-only; mapped once, again only if the file is another or has another size.

        Raises:
            QueueError: a name that is no segment of this run, no such segment, or one that is shorter than ``length``.
        """
        handle = _open(self._folder, self._pattern, name)
        try:
            facts = _checked(name, os.fstat(handle), length)
            identity = (facts.st_ino, facts.st_size)
            known = self._known.pop(name, None)
            if known is None or known[0] != identity:
                known = (identity, mmap.mmap(handle, facts.st_size, prot=mmap.PROT_READ))
        finally:
            os.close(handle)
        self._known[name] = known
        while len(self._known) > self._max_mapped:
            self._known.popitem(last=False)  # unmapped when its last view goes
        return memoryview(known[1])[:length]

    def close(self) -> None:
        """Forgets all mappings; views that are still held stay valid."""
        self._known.clear()


class SegmentKeeper:
    """The broker's hand on the segments of all its producers."""

    def __init__(self, run_id: str, *, folder: Path = SHM_FOLDER) -> None:
        self._pattern = _pattern(run_id)
        self._folder = folder
        self._prefix = f"asyncrl-{run_id}.q."

    def check(self, name: str, length: int) -> None:
        """Looks whether a segment is there: a regular file of this user that holds ``length`` bytes.

        Raises:
            QueueError: it is not. SchemaError: the name is none of this run's.
        """
        handle = _open(self._folder, self._pattern, name)
        try:
            _checked(name, os.fstat(handle), length)
        finally:
            os.close(handle)

    def unlink(self, name: str) -> None:
        """Removes a segment; nothing happens if it is gone."""
        _check_name(self._pattern, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / name)

    def sweep(self, keep: Collection[str]) -> list[str]:
        """Removes every segment of the run that is not in ``keep``; returns their names."""
        found = sorted(entry.name for entry in os.scandir(self._folder) if entry.name.startswith(self._prefix))
        gone = [name for name in found if name not in keep and self._pattern.fullmatch(name)]
        for name in gone:
            self.unlink(name)
        return gone


def _pattern(run_id: str) -> re.Pattern[str]:
    if not re.fullmatch(r"[\w-]+", run_id, re.ASCII):
        raise QueueError(f"a run id has letters, digits, _ and -; met {run_id!r}")
    return re.compile(rf"asyncrl-{re.escape(run_id)}\.q\.[\w-]+\.[0-9]+", re.ASCII)


def _check_name(pattern: re.Pattern[str], name: str) -> None:
    if not pattern.fullmatch(name):
        raise SchemaError(f"the name of a segment of this run follows {pattern.pattern}; met {name[:120]!r}")


def _open(folder: Path, pattern: re.Pattern[str], name: str) -> int:
    _check_name(pattern, name)
    try:
        return os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)
    except OSError as error:
        raise QueueError(f"segment {name} cannot be opened in {folder} ({error.strerror}): its producer or a sweep removed it") from error


def _checked(name: str, facts: os.stat_result, length: int) -> os.stat_result:
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        raise QueueError(f"segment {name} is a regular file of user {os.geteuid()}; met mode {facts.st_mode:o} of user {facts.st_uid}")
    if not 0 < length <= facts.st_size:
        raise QueueError(f"segment {name} has {facts.st_size} bytes; a payload of {length} was announced")
    return facts


def _pieces(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """Pieces that stay in a core's cache between being summed up and being copied: memory is read once."""
    for view in views:
        for start in range(0, view.nbytes, _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
