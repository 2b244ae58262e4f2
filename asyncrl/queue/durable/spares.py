"""Released segment files that are kept to be written anew, since pages and blocks that are there cost a fraction of new ones.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.queue.durable.segment_file import SegmentFile

__all__ = ["Spares"]


class Spares:
    """At most ``limit`` files, of ``limit_bytes`` together; those of an earlier process go."""

    def __init__(self, folder: Path, limit: int, limit_bytes: int) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._files: list[SegmentFile] = []
        for path in folder.glob("spare-*.log"):
            path.unlink()

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(file.capacity for file in self._files)

    @property
    def next_bytes(self) -> int:
        """Bytes of the file that :meth:`take` would give; 0 if there is none."""
        return self._files[-1].capacity if self._files else 0

    def take(self) -> SegmentFile | None:
        """The file released last, whose pages are most likely still in memory."""
        return self._files.pop() if self._files else None

    def prefer(self, num_bytes: int) -> bool:
        """Whether a file of so many bytes is there; :meth:`take` gives it next."""
        large = [file for file in self._files if file.capacity >= num_bytes]
        if large:
            self._files.remove(large[-1])
            self._files.append(large[-1])
        return bool(large)

    def drop(self) -> bool:
        """Removes the oldest file, for its space; false if there is none."""
        if self._files:
            self._files.pop(0).unlink()
            return True
        return False

    def offer(self, file: SegmentFile, room: bool) -> None:
        """A file that is needed no more: it is kept, or removed if the disk has no ``room``, enough are kept or it is still being read."""
        wanted = room and len(self._files) < self._limit and self.num_bytes + file.capacity <= self._limit_bytes
        if wanted and file.retire():
            self._files.append(file)
        else:
            file.unlink()
