"""Starts ``asyncrl`` as a user would, and looks at the processes it makes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

_drivers: list[subprocess.Popen[str]] = []


def end_leftover_runs() -> None:
    """Kills drivers that a failed test left running; their guardians clean up."""
    while _drivers:
        driver = _drivers.pop()
        if driver.poll() is None:
            driver.kill()
            driver.wait()


def start_run(run_dir: Path, *overrides: str, command: str = "train") -> subprocess.Popen[str]:
    """``asyncrl train … run_dir=…`` in the background, its console in ``console.log`` beside the run directory."""
    console = run_dir.with_suffix(".console").open("a")
    target = [f"run_dir={run_dir}"] if command == "train" else [str(run_dir)]
    arguments = [
        sys.executable,
        "-m",
        "asyncrl",
        command,
        *(target if command != "train" else []),
        *overrides,
        *(target if command == "train" else []),
    ]
    driver = subprocess.Popen(arguments, stdout=console, stderr=console, text=True, start_new_session=True)
    _drivers.append(driver)
    return driver


def everything_of(run_dir: Path) -> set[int]:
    """Living pids of a run, engine children and launchers included, whatever their titles say now."""
    roots = belonging_to(run_dir)
    return set(roots).union(*(descendants(pid) for pid in roots))


def console(run_dir: Path) -> str:
    return run_dir.with_suffix(".console").read_text()


def metrics(run_dir: Path) -> list[dict]:
    """The steps written so far; a line that is being written is left for the next look."""
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")] if file.exists() else []


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def wait_until(condition, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def commands() -> dict[int, str]:
    """Command line of every living process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def belonging_to(run_dir: Path) -> dict[int, str]:
    """Living processes that name the run's directory or its scratch folder."""
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"] if (run_dir / "run.json").exists() else str(run_dir)
    mine = {pid: text for pid, text in commands().items() if str(run_dir) in text or f"asyncrl-{run_id}" in text}
    mine.pop(os.getpid(), None)
    return mine


def descendants(pid: int) -> set[int]:
    from asyncrl.launch.reaper import descendants as below

    return set(below(pid))


def find(run_dir: Path, module: str, name: str = "") -> int:
    """The pid of ``python -m MODULE RUN_DIR … NAME``, not of a reaper that wraps it.

    A child that was just forked has its parent's command line for a moment: it is looked for until there is one.
    """
    hits: list[int] = []

    def one() -> bool:
        hits[:] = [
            pid
            for pid, text in commands().items()
            if f"-m {module} " in text and str(run_dir) in text and name in text and "asyncrl.launch.reaper" not in text
        ]
        return len(hits) == 1

    wait_until(one, 5, f"one process of {module} {name} in {run_dir}")
    return hits[0]
