"""Payload of finished groups, in memory, with its checksum.

Source: design note, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.errors import QueueError, SchemaError
from asyncrl.queue.wire import checksum

__all__ = ["PayloadStore"]


class PayloadStore:
    """Frames by ticket, kept from the put to the settlement of their group."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[Any, int]] = {}

    def __len__(self) -> int:
        return len(self._frames)

    def keep(self, ticket: int, frame: Any, expected: int) -> None:
        """Keeps a frame whose CRC-32 was checked to be ``expected``."""
        self._frames[ticket] = (frame, expected)

    def forget(self, ticket: int) -> None:
        """Frees a settled group's payload; nothing happens if there was none."""
        self._frames.pop(ticket, None)

    def fetch(self, tickets: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Frames and their checksums, computed anew over the bytes.

        Raises:
            QueueError: a ticket without payload. SchemaError: bytes changed while they lay here.
        """
        missing = [ticket for ticket in tickets if ticket not in self._frames]
        if missing:
            raise QueueError(f"leased groups can be fetched until their step is committed; there is no payload of tickets {missing[:8]}")
        frames, sums = [], []
        for ticket in tickets:
            frame, expected = self._frames[ticket]
            met = checksum(frame)
            if met != expected:
                raise SchemaError(
                    f"payload of ticket {ticket} had CRC-32 {expected} when it came and {met} now: memory was damaged", ticket=ticket
                )
            frames.append(frame)
            sums.append(met)
        return frames, sums
