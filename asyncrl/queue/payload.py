"""Checksum and sizes of a group's payload: frames in, numbers out.

The checksum is end to end: the producer takes it over what it encoded, the consumer over what it is about to decode, however the
bytes were cut into frames on the way.

Source: design note, section 4; XXH3 (64 bits), https://xxhash.com.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

__all__ = ["checksum", "frame_lengths"]


def checksum(frames: Sequence[Any]) -> int:
    """XXH3-64 of the concatenated frames: unsigned 64 bits, the same for every way to cut the bytes.

    Example:
        >>> checksum([b"as", b"ync"]) == checksum([b"async"])
        True
    """
    if len(frames) == 1:
        return xxhash.xxh3_64_intdigest(frames[0])
    state = xxhash.xxh3_64()
    for frame in frames:
        state.update(frame)
    return state.intdigest()


def frame_lengths(frames: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of each frame."""
    return tuple(memoryview(frame).nbytes for frame in frames)
