"""Shared memory on one host: segments in /dev/shm.

Mapped as files rather than through ``multiprocessing.shared_memory``: a reader's exit must not unlink a segment that others use.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import UnsupportedError
from asyncrl.sync.segments import Segments, open_segment
from asyncrl.sync.transports import register

__all__ = ["SHM_FOLDER", "new_shm"]

SHM_FOLDER = Path("/dev/shm")


def new_shm(facts: RunFacts, run_dir: RunDir) -> Segments:
    """Write side; leftovers of the same run are removed.

    Raises:
        UnsupportedError: this host has no /dev/shm.
    """
    if not SHM_FOLDER.is_dir():
        raise UnsupportedError(f"sync.transport=shm needs {SHM_FOLDER}, which is missing on this host: set sync.transport=file")
    return Segments("shm", SHM_FOLDER, f"asyncrl-{facts.run_id}", facts.incarnation)


register("shm", new_shm, open_segment)
