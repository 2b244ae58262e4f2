"""Processes that a measurement starts: their environment, and what they print."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrl.errors import AsyncRLError

__all__ = ["child_environment", "run_child"]

_ROOT = str(Path(__file__).parent.parent)


def child_environment(**more: str) -> dict[str, str]:
    """This process's, with one thread a process and this tree first among the packages."""
    paths = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **more}


def run_child(module: str, *arguments: str, timeout_s: float) -> Any:
    """Runs ``python -m module arguments`` in a group of its own; the JSON value of the last line that it prints.

    Raises:
        AsyncRLError: it failed or took too long; the message has the end of what it wrote.
    """
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AsyncRLError(f"{module} was not done after {timeout_s:g} s") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise AsyncRLError(f"{module} ended with exit code {process.returncode}: {' '.join(err.split())[-500:]}")
    return json.loads(out.splitlines()[-1])
