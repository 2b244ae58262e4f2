"""The file of dropped groups, ``dead_letter.jsonl``: one JSON line each, with every reason.

Consumes entries, appends lines. A disk that refuses them stops nobody: they are kept, and written when it takes them again.

Source: design note, section 4.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from pathlib import Path
from typing import Any

__all__ = ["DeadLetters"]

log = logging.getLogger(__name__)

KEPT = 1024


class DeadLetters:
    """Appends to one file; at most :data:`KEPT` lines wait for a disk, further ones are in the broker's log alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten: deque[bytes] = deque()
        self._refused = False

    def add(self, entry: dict[str, Any]) -> None:
        """Writes an entry now, or later if the disk refuses it."""
        if len(self._unwritten) < KEPT:
            self._unwritten.append(json.dumps(entry).encode() + b"\n")
        self.write()

    def write(self) -> None:
        """Writes what waits, as far as the disk takes it; the first refusal is said."""
        if not self._unwritten:
            return
        try:
            self._append()
        except OSError as error:
            if not self._refused:
                log.error("%s cannot be written: %s; up to %d dropped groups are kept until it can be", self._path, error, KEPT)
            self._refused = True
            return
        self._refused = False

    def _append(self) -> None:
        with self._path.open("ab", buffering=0) as file:
            while self._unwritten and (written := file.write(self._unwritten[0])):
                line = self._unwritten.popleft()
                if written < len(line):  # the next write goes on there, or says what is wrong
                    self._unwritten.appendleft(line[written:])
