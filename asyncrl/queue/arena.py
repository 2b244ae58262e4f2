"""A producer's segments of shared memory: groups in, names and lengths out.

A segment is written by its producer alone, and again only after the broker said that its group is settled (``recycle``): that keeps its
pages, so that a steady run neither faults nor frees any. Nothing is waited for: beyond its limit the arena refuses, and a recycle unblocks.

Source: design note, section 4.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.errors import QueueError
from asyncrl.queue.shm import OPEN_FLAGS, SHM_FOLDER, Segment, check_owner

__all__ = ["Arena", "size_class"]

_SMALLEST_BYTES = 1 << 16
_HUGE_PAGE_BYTES = 1 << 21
_MADV_COLLAPSE = 25  # Linux 6.1; the mmap module of Python 3.12 has no name for it
_PIECE_BYTES = 1 << 19
_MAX_MAPPED = 128
"""Each mapping holds an open file, of which a process often may have a thousand; the segments written longest ago are unmapped."""


@dataclass(slots=True)
class _Own:
    """A segment of this producer; ``touched`` of its ``capacity`` bytes hold pages. It has no ``view`` while it isn't mapped."""

    name: str
    capacity: int
    touched: int = 0
    view: mmap.mmap | None = field(default=None, repr=False)


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

    source = ""
    """No address: payload is read where it lies."""

    def __init__(self, run_id: str, owner: str, limit_bytes: int, *, folder: Path = SHM_FOLDER) -> None:
        check_owner(run_id, owner)
        if not folder.is_dir():
            raise QueueError(f"payload in shared memory needs {folder}, which is missing on this host: use inline payload")
        self._prefix = f"asyncrl-{run_id}.q.{owner}."
        self._folder = folder
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._numbers = itertools.count()
        self._used: dict[str, _Own] = {}
        self._free: defaultdict[int, list[_Own]] = defaultdict(list)
        self._mapped: OrderedDict[str, _Own] = OrderedDict()

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
        try:
            target = self._view(own)
        except OSError as error:
            self._give_up(own)
            raise self._unusable(length, error) from error
        state = xxhash.xxh3_64()
        position = 0
        for piece in _pieces(views):
            state.update(piece)
            target[position : position + piece.nbytes] = piece
            position += piece.nbytes
        self._used[own.name] = own
        return Segment(own.name, length, state.intdigest())

    def recycle(self, names: Iterable[str]) -> None:
        """The groups in these segments are settled: they may be written again. What a predecessor of this name left is removed."""
        for name in names:
            own = self._used.pop(name, None)
            if own is not None:
                self._free[own.capacity].append(own)
            elif name.startswith(self._prefix) and "/" not in name:
                (self._folder / name).unlink(missing_ok=True)

    def close(self, unlink: bool) -> None:
        """Unmaps all and removes the free segments; with ``unlink`` the used ones too: only when nobody will read them any more."""
        for own in self._used.values():
            self._drop(own, unlink)
        for own in itertools.chain.from_iterable(self._free.values()):
            self._drop(own, unlink=True)
        self._used.clear()
        self._free.clear()

    def _take(self, length: int) -> _Own:
        """A free or new segment with pages for ``length`` bytes, all of them there before the first one is written."""
        capacity = size_class(length)
        own = self._spare(capacity)
        growth = max(0, _pages(length) - (own.touched if own else 0))
        self._shrink(growth, spare=own)
        if self.num_bytes + growth > self.limit_bytes:
            raise QueueError(
                f"shared memory of this producer is limited to {self.limit_bytes} bytes; {self.num_bytes} are in {self.num_used} groups "
                f"that aren't settled and {length} are wanted: wait for a commit, raise the limit, or lower queue.max_queued_mib",
                num_bytes=length,
            )
        if own is None:
            try:
                own = self._create(capacity)
            except OSError as error:
                raise self._unusable(length, error) from error
        else:
            self._free[capacity].remove(own)
        self._reserve(own, length, growth)
        return own

    def _spare(self, capacity: int) -> _Own | None:
        """The free segment with the most pages. One whose file somebody has removed is given up: nobody could read it."""
        free = self._free[capacity]
        while free:
            own = max(free, key=lambda one: one.touched)
            if (self._folder / own.name).exists():
                return own
            free.remove(own)
            self._give_up(own)
        return None

    def _shrink(self, growth: int, *, spare: _Own | None) -> None:
        """Gives up free segments of other sizes until ``growth`` fits."""
        for free in self._free.values():
            for own in [one for one in free if one is not spare]:
                if self.num_bytes + growth <= self.limit_bytes:
                    return
                free.remove(own)
                self._give_up(own)

    def _create(self, capacity: int) -> _Own:
        while True:
            name = f"{self._prefix}{next(self._numbers)}"
            try:
                handle = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
                break
            except FileExistsError:
                continue  # left by an earlier process of this name: the broker decides when it goes
        try:
            os.ftruncate(handle, capacity)
        finally:
            os.close(handle)
        return _Own(name, capacity)

    def _view(self, own: _Own) -> mmap.mmap:
        """The mapping of a segment, made if it isn't there."""
        if own.view is None:
            handle = os.open(self._folder / own.name, os.O_RDWR | OPEN_FLAGS)
            try:
                own.view = mmap.mmap(handle, own.capacity)
            finally:
                os.close(handle)
            self._mapped[own.name] = own
            if len(self._mapped) > _MAX_MAPPED:
                self._unmap(next(iter(self._mapped.values())))
        self._mapped.move_to_end(own.name)
        return own.view

    def _unmap(self, own: _Own) -> None:
        self._mapped.pop(own.name, None)
        if own.view is not None:
            own.view.close()
            own.view = None

    def _reserve(self, own: _Own, length: int, growth: int) -> None:
        """Allocates the pages now: a mapping that finds no page later is a SIGBUS and not an error."""
        if not growth:
            return
        try:
            handle = os.open(self._folder / own.name, os.O_RDWR | OPEN_FLAGS)
            try:
                os.posix_fallocate(handle, 0, _pages(length))
            finally:
                os.close(handle)
        except OSError as error:
            self._give_up(own)
            raise self._unusable(length, error) from error
        with contextlib.suppress(OSError):  # huge pages are a gain where the host gives them, no need
            if length >= _HUGE_PAGE_BYTES:
                self._view(own).madvise(_MADV_COLLAPSE, 0, length // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
        own.touched += growth
        self.num_bytes += growth

    def _unusable(self, length: int, error: OSError) -> QueueError:
        return QueueError(
            f"{self._folder} has no room for a payload of {length} bytes ({error.strerror}): enlarge it, or use inline payload",
            num_bytes=length,
        )

    def _give_up(self, own: _Own) -> None:
        """It is neither used nor free any more."""
        self.num_bytes -= own.touched
        self._drop(own, unlink=True)

    def _drop(self, own: _Own, unlink: bool) -> None:
        self._unmap(own)
        if unlink:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / own.name)


def _pieces(views: Iterable[memoryview]) -> Iterator[memoryview]:
    """Pieces that stay in a core's cache between being summed up and being copied: memory is read once."""
    for view in views:
        for start in range(0, view.nbytes, _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
