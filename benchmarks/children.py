"""Environment of the processes that a measurement starts."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["child_environment"]

_ROOT = str(Path(__file__).parent.parent)


def child_environment(**more: str) -> dict[str, str]:
    """This process's, with one thread a process and this tree first among the packages."""
    paths = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **more}
