"""Runs one process of the run and leaves nothing of it behind. Standard library only.

    launcher ── stdin pipe ──▶ reaper ── own session ──▶ process ──▶ engine children

The reaper adopts every orphan below it (Linux child subreaper). It ends them all when the process
exits, when the launcher's pipe closes because the launcher died, or after SIGTERM and a grace. Shared-memory
segments that a killed process had mapped are removed once nobody maps them any more.

    python -m asyncrl.launch.reaper GRACE_S LOG_FILE COMMAND …
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SEGMENTS = "/dev/shm/psm_"
LOOK_EVERY_S = 2.0
LAUNCHER_LOST = 75  # EX_TEMPFAIL


def descendants(root: int) -> list[int]:
    """Pids of all living processes below ``root``, by the parent links in /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if stat[0] != "Z":
                    children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def mapped_segments(pid: int) -> set[str]:
    """Shared-memory segments of Python's own naming that a process has mapped."""
    with contextlib.suppress(OSError):
        lines = (Path("/proc") / str(pid) / "maps").read_text().splitlines()
        return {path for line in lines if (path := line.partition("/")[1] + line.partition("/")[2]).startswith(SEGMENTS)}
    return set()


def remove_segments(segments: set[str]) -> None:
    """Removes the segments that no living process maps."""
    if not segments:
        return
    living = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    in_use = set().union(*(mapped_segments(pid) for pid in living))
    for path in segments - in_use:
        Path(path).unlink(missing_ok=True)


def kill_all(root: int, deadline_s: float = 5.0) -> None:
    """Kills every descendant of ``root`` and waits until they are gone."""
    end = time.monotonic() + deadline_s
    while (pids := descendants(root)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.02)
    reap()


def reap() -> dict[int, int]:
    """Collects children that have exited: pid → exit code, negative for a signal."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


def die_with_parent() -> None:
    """For a child between fork and exec: kill -9 when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Runs the command to its end; returns its exit code (128 + signal when it was killed)."""
    grace_s, log_file, command = float(arguments[0]), arguments[1], arguments[2:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    asked: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log_file, "ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    print(child.pid, flush=True)
    segments: set[str] = set()
    code = _watch(child.pid, asked, grace_s, segments)
    kill_all(os.getpid())
    remove_segments(segments)
    return code if code >= 0 else 128 - code


def _watch(pid: int, asked: list[float], grace_s: float, segments: set[str]) -> int:
    forwarded, look_s = False, 0.0
    while True:
        if time.monotonic() >= look_s:
            look_s = time.monotonic() + LOOK_EVERY_S
            segments.update(*(mapped_segments(child) for child in descendants(os.getpid())))
        codes = reap()
        if pid in codes:
            return codes[pid]
        if _launcher_gone():
            return LAUNCHER_LOST
        if asked and not forwarded:
            forwarded = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if asked and time.monotonic() - asked[0] > grace_s:
            return -signal.SIGKILL
        time.sleep(0.05)


def _launcher_gone() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and os.read(sys.stdin.fileno(), 1) == b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
