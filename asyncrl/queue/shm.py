"""Payload in shared memory of one host, or in files of the broker's log: only a name and a length pass the broker.

A producer copies a group into a segment (:mod:`asyncrl.queue.arena`), a file in /dev/shm of which the broker gets name and length;
a consumer's :class:`Mappings` views it without a copy; the broker's :class:`SegmentKeeper` checks and removes. A segment is as large
as its size class; tmpfs holds only the pages that were written.

Source: design note, section 4.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import QueueError, SchemaError

__all__ = ["OPEN_FLAGS", "SHM_FOLDER", "Mappings", "Segment", "SegmentKeeper", "check_owner", "name_pattern"]

SHM_FOLDER = Path("/dev/shm")
OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_LOG_FILE = re.compile(r"segment-[0-9]+\.log", re.ASCII)


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a payload lies: file name in the folder, its bytes, and their XXH3-64."""

    name: str
    length: int
    checksum: int


class Mappings:
    """A consumer's read-only views of segments and log files, kept by name; the ones unused for longest go beyond ``max_mapped``.

    Each mapping holds an open file, of which a process often may have a thousand.
    """

    def __init__(self, run_id: str, *, max_mapped: int = 128, folder: Path = SHM_FOLDER) -> None:
        self._pattern = name_pattern(run_id)
        self._folder = folder
        self._max_mapped = max_mapped
        self._known: OrderedDict[str, tuple[int, mmap.mmap]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def view(self, name: str, length: int) -> memoryview:
        """The first ``length`` bytes of a segment, read-only; mapped once, again only if the file is another, has grown or shrunk.

        Raises:
            QueueError: a name that is no segment of this run, no such segment, or one that is shorter than ``length``.
        """
        check_name(self._pattern, name)
        return self._view(self._folder / name, 0, length)

    def view_file(self, path: str, offset: int, length: int) -> memoryview:
        """Bytes of a file of the broker's log, read-only.

        Raises:
            QueueError: no such file, or it ends before. SchemaError: not the name of a log's file.
        """
        file = Path(path)
        check_name(_LOG_FILE, file.name)
        return self._view(file, offset, length)

    def reaches(self, path: str) -> bool:
        """Whether a file can be opened here, and is of a kind and user that :meth:`view_file` takes."""
        try:
            handle = _open(Path(path))
        except QueueError:
            return False
        try:
            _checked(path, os.fstat(handle), 1)
        except QueueError:
            return False
        finally:
            os.close(handle)
        return True

    def _view(self, path: Path, offset: int, length: int) -> memoryview:
        handle = _open(path)
        try:
            facts = _checked(path.name, os.fstat(handle), offset + length)
            known = self._known.pop(str(path), None)
            if known is None or known[0] != facts.st_ino or not offset + length <= len(known[1]) <= facts.st_size:
                known = (facts.st_ino, mmap.mmap(handle, facts.st_size, prot=mmap.PROT_READ))
        finally:
            os.close(handle)
        self._known[str(path)] = known
        while len(self._known) > self._max_mapped:
            self._known.popitem(last=False)  # unmapped when its last view goes
        return memoryview(known[1])[offset : offset + length]

    def forget_gone(self) -> None:
        """Forgets mappings of files that were removed: they hold disk or memory that nobody counts. Views that are held stay valid."""
        for path in [path for path, (inode, _) in self._known.items() if not _is_at(path, inode)]:
            del self._known[path]

    def close(self) -> None:
        """Forgets all mappings; views that are still held stay valid."""
        self._known.clear()


class SegmentKeeper:
    """The broker's hand on the segments of all its producers."""

    def __init__(self, run_id: str, *, folder: Path = SHM_FOLDER) -> None:
        self._pattern = name_pattern(run_id)
        self._folder = folder
        self._prefix = f"asyncrl-{run_id}.q."

    def check(self, name: str, length: int) -> None:
        """Looks whether a segment is there: a regular file of this user that holds ``length`` bytes.

        Raises:
            QueueError: it is not. SchemaError: the name is none of this run's.
        """
        self.check_name(name)
        handle = _open(self._folder / name)
        try:
            _checked(name, os.fstat(handle), length)
        finally:
            os.close(handle)

    def is_name(self, name: str) -> bool:
        """Whether a segment of this run can have the name."""
        return bool(self._pattern.fullmatch(name))

    def check_name(self, name: str) -> None:
        """Raises SchemaError for a name that is none of this run's."""
        check_name(self._pattern, name)

    def unlink(self, name: str) -> None:
        """Removes a segment; nothing happens if it is gone."""
        self.check_name(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder / name)

    def sweep(self, keep: Collection[str], owner: str = "") -> list[str]:
        """Removes every segment of the run, or of one ``owner``, that is not in ``keep``; returns their names."""
        prefix = f"{self._prefix}{owner}." if owner else self._prefix
        found = sorted(entry.name for entry in os.scandir(self._folder) if entry.name.startswith(prefix))
        gone = [name for name in found if name not in keep and self._pattern.fullmatch(name)]
        for name in gone:
            self.unlink(name)
        return gone


def name_pattern(run_id: str) -> re.Pattern[str]:
    """What the names of a run's segments look like.

    Raises:
        QueueError: a run id that cannot be part of a file name.
    """
    if not re.fullmatch(r"[\w-]+", run_id, re.ASCII):
        raise QueueError(f"a run id has letters, digits, _ and -; met {run_id!r}")
    return re.compile(rf"asyncrl-{re.escape(run_id)}\.q\.[\w-]+\.[0-9]+", re.ASCII)


def check_owner(run_id: str, owner: str) -> None:
    """Raises QueueError for a producer's name that cannot be part of a segment's name."""
    name_pattern(run_id)
    if not re.fullmatch(r"[\w-]+", owner, re.ASCII):
        raise QueueError(f"the owner of segments has letters, digits, _ and -; met {owner!r}")


def check_name(pattern: re.Pattern[str], name: str) -> None:
    """Raises SchemaError for a name that the pattern does not fit."""
    if not pattern.fullmatch(name):
        raise SchemaError(f"the name of a segment follows {pattern.pattern}; met {name[:120]!r}")


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | OPEN_FLAGS)
    except OSError as error:
        raise QueueError(
            f"segment {path.name} cannot be opened in {path.parent} ({error.strerror}): its producer or a sweep removed it"
        ) from error


def _is_at(path: str, inode: int) -> bool:
    try:
        return os.stat(path, follow_symlinks=False).st_ino == inode
    except OSError:
        return False


def _checked(name: str, facts: os.stat_result, length: int) -> os.stat_result:
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        raise QueueError(f"segment {name} is a regular file of user {os.geteuid()}; met mode {facts.st_mode:o} of user {facts.st_uid}")
    if not 0 < length <= facts.st_size:
        raise QueueError(f"segment {name} has {facts.st_size} bytes; a payload of {length} was announced")
    return facts
