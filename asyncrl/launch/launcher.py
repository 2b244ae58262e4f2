"""A launcher: the small Ray actor that runs one real process of the run beside it.

Ray places and restarts launchers; no data ever passes through them. The process runs under a reaper in a
session of its own, so that it and its engine children end when the launcher dies or is told to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Launcher", "ProcessState", "actor_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process as its launcher sees it: ``exit_code`` is None while it runs, 128 + n after signal n."""

    pid: int
    exit_code: int | None
    last_line: str


def actor_name(run_id: str, process: str, number: int) -> str:
    """The Ray name of the ``number``-th launcher of a run."""
    return f"asyncrl-{run_id}-{process}-{number}"


class Launcher:
    """Runs one process; made a detached Ray actor by the supervisor."""

    def __init__(self) -> None:
        self._reaper: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._log_file = ""

    def start(self, command: Sequence[str], environment: Mapping[str, str], log_file: str, grace_s: float) -> int:
        """Starts the command and returns its pid; what it prints goes to ``log_file``."""
        self._log_file = log_file
        reaper = [sys.executable, "-m", "asyncrl.launch.reaper", str(grace_s), log_file, *command]
        self._reaper = subprocess.Popen(
            reaper, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._reaper.stdout is not None
        self._pid = int(self._reaper.stdout.readline() or 0)
        return self._pid

    def state(self) -> ProcessState:
        """Pid, exit code and last log line of the process."""
        code = self._reaper.poll() if self._reaper else 0
        if code is not None and code < 0:  # the reaper itself was killed: end what it left in the group
            self._kill_group()
            code = 128 - code
        return ProcessState(pid=self._pid, exit_code=code, last_line=_last_line(self._log_file) if code is not None else "")

    def terminate(self) -> None:
        """Asks the process to end; the reaper kills it after its grace."""
        if self._reaper and self._reaper.poll() is None:
            self._reaper.terminate()

    def kill(self) -> None:
        """Ends the process and all below it now."""
        if self._reaper and self._reaper.poll() is None and self._reaper.stdin:
            self._reaper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(8.0)

    def pid(self) -> int:
        """The launcher's own pid."""
        return os.getpid()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)


def _last_line(log_file: str) -> str:
    try:
        with open(log_file, "rb") as log:
            log.seek(max(0, os.path.getsize(log_file) - 4096))
            lines: list[Any] = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return str(lines[-1])[-300:] if lines else ""
