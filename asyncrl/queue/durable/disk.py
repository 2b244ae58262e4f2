"""What the log asks of a disk: room, one writer, whole writes, names that survive a power loss, and words for what went wrong.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import xxhash

from asyncrl.errors import DiskFull, QueueError

__all__ = ["check_room", "checksum_at", "free_bytes_of", "is_full", "lock_folder", "refusal", "says_full", "sync_folder", "write_all"]

MAX_BUFFERS = 1024  # IOV_MAX of Linux
READ_BYTES = 1 << 20
FULL_BYTES = 64 << 10  # what a small file, its folder's entry and SQLite's index of its log take


def free_bytes_of(folder: Path) -> int:
    """Bytes that this user may still write on the folder's disk."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def check_room(folder: Path, free: int, needed: int, reserve: int) -> None:
    """Raises DiskFull unless ``needed`` bytes leave ``reserve`` bytes of the ``free`` ones."""
    if free - needed < reserve:
        raise DiskFull(
            f"{folder} has {free} bytes free, of which {reserve} stay in reserve; a group needs {needed}: "
            "free space on that disk, or let the learner take groups",
            folder=str(folder),
            free_bytes=free,
            needed_bytes=needed,
        )


def is_full(folder: Path) -> bool:
    """Whether the folder's disk has no room for so much as a small new file; one that does not answer is not called full."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return False
    return facts.f_bavail * facts.f_frsize < FULL_BYTES or (facts.f_files > 0 and facts.f_favail == 0)


def says_full(error: OSError) -> bool:
    """Whether an error says that a disk, or the user's share of it, has no room."""
    return isinstance(error, DiskFull) or error.errno in (errno.ENOSPC, errno.EDQUOT)


def refusal(folder: Path, error: OSError, free: int, needed: int) -> DiskFull | QueueError:
    """The error for a write of ``needed`` bytes that the system refused."""
    if says_full(error):
        return DiskFull(
            f"{folder} refused {needed} bytes for a group with {free} bytes free ({error.strerror}): free space on that disk",
            folder=str(folder),
            free_bytes=free,
            needed_bytes=needed,
        )
    return QueueError(f"the segment log in {folder} cannot be written: {error}; mend the disk and start the run again")


def lock_folder(folder: Path) -> int:
    """A handle that keeps other writers out until it is closed or the process ends.

    Raises:
        QueueError: another process has it.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise QueueError(f"one process writes the segment log in {folder}, and it is still there: end it first") from error
    return lock


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(fd: int, buffers: list[memoryview], position: int) -> None:
    """Writes all buffers from byte ``position`` of a file on, however often the system stops short. Raises OSError."""
    first = 0
    while first < len(buffers):
        written = os.pwritev(fd, buffers[first : first + MAX_BUFFERS], position)
        position += written
        if not written and any(buffer.nbytes for buffer in buffers[first : first + MAX_BUFFERS]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while first < len(buffers) and written >= buffers[first].nbytes:
            written -= buffers[first].nbytes
            first += 1
        if written:
            buffers[first] = buffers[first][written:]


def checksum_at(fd: int, offset: int, length: int) -> int:
    """xxh3-64 of the bytes of a file; of fewer if it ends before. Raises OSError."""
    digest, buffer, position, end = xxhash.xxh3_64(), memoryview(bytearray(min(READ_BYTES, max(length, 1)))), offset, offset + length
    while position < end:
        number = os.preadv(fd, [buffer[: end - position]], position)
        if not number:
            break
        digest.update(buffer[:number])
        position += number
    return digest.intdigest()
