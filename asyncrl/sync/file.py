"""Segments as files in the run directory: for hosts that share a file system, or whose /dev/shm is too small."""

from __future__ import annotations

from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.sync.segments import Segments, open_segment
from asyncrl.sync.transports import register

__all__ = ["new_file"]


def new_file(facts: RunFacts, run_dir: RunDir) -> Segments:
    """Write side; leftovers of the same run are removed."""
    return Segments("file", run_dir.weights, "weights", facts.incarnation)


register("file", new_file, open_segment)
