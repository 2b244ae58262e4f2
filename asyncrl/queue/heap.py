"""glibc in a process through which payload passes: pages of freed messages stay for the next ones, large copies bypass the cache.

ZeroMQ allocates each large frame anew. By default glibc maps such a block and unmaps it again, so that every page of every message
is faulted in and zeroed, which costs more than copying it. A copy into shared memory is read by another process, later: written through
the cache, the lines that it overwrites are read first, and what the engine has there is thrown out. It consumes and produces nothing,
and waits for nothing.

Source: mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html; glibc manual, "Tunables", x86_non_temporal_threshold.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

__all__ = ["LARGEST_BLOCK_BYTES", "keep_pages", "not_for_children", "streaming_copies"]

LARGEST_BLOCK_BYTES = 32 << 20
"""Larger blocks are mapped whatever is set: glibc's own limit."""

_TUNABLES = "GLIBC_TUNABLES"
_STREAMING = f"glibc.cpu.x86_non_temporal_threshold={256 << 10:#x}"

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_TRIM_BYTES = (2 << 30) - 1
_PAD_BYTES = 64 << 20


def keep_pages() -> bool:
    """Sets one arena and thresholds that keep up to 2 GiB of freed memory; call it before the first ZeroMQ context.

    Returns:
        Whether this is a glibc that took all of it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, LARGEST_BLOCK_BYTES),
        (_M_TRIM_THRESHOLD, _TRIM_BYTES),
        (_M_TOP_PAD, _PAD_BYTES),
    )
    taken = [mallopt(name, value) for name, value in wanted]
    return all(taken)


def streaming_copies(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What is added to the environment of a process that copies payload into shared memory: glibc reads it when the process starts.

    Nothing where the user has set tunables.

    Example:
        >>> streaming_copies({})
        {'GLIBC_TUNABLES': 'glibc.cpu.x86_non_temporal_threshold=0x40000'}
    """
    return {} if _TUNABLES in environment else {_TUNABLES: _STREAMING}


def not_for_children() -> None:
    """New interpreters that this process starts copy as they always do; one that it forks copies as it does itself."""
    if os.environ.get(_TUNABLES) == _STREAMING:
        del os.environ[_TUNABLES]
