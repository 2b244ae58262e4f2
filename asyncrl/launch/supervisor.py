"""Starts the processes of a run through launchers, sees them end, starts generators again.

Consumes process specifications and launcher states; produces :class:`Exit` events; every call to Ray has a
deadline, and a launcher that does not answer counts as dead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.errors import ProcessDied
from asyncrl.launch.launcher import Launcher, ProcessState, actor_name
from asyncrl.launch.reaper import LAUNCHER_LOST

__all__ = ["Exit", "ProcessSpec", "Supervisor"]

CALL_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run: a name (``generator-0``), a command, its environment, and the GPU share that Ray reserves."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A process that ended; ``code`` is 128 + n after signal n, ``LAUNCHER_LOST`` when its launcher went first."""

    name: str
    code: int
    last_line: str

    @property
    def reason(self) -> str:
        """How it ended, in words."""
        if self.code == LAUNCHER_LOST:
            return "its launcher died"
        if self.code > 128:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(self.code - 128).name}"
        return f"exit code {self.code}"


class Supervisor:
    """Owns the launchers of one run.

    Args:
        ray: the connected ray module.
        run_id: names the launchers.
        logs: folder of the processes' logs.
        grace_s: how long a process may take to end after it was asked.
    """

    def __init__(self, ray: Any, run_id: str, logs: Path, grace_s: float) -> None:
        self._ray = ray
        self._run_id = run_id
        self._logs = logs
        self._grace_s = grace_s
        self._launchers: dict[str, Any] = {}
        self._running: set[str] = set()
        self._started = 0
        self.pids: dict[str, int] = {}

    def start(self, spec: ProcessSpec) -> None:
        """Places a launcher and starts the process under it.

        Raises:
            ProcessDied: Ray could not place the launcher, or it did not answer.
        """
        self._started += 1  # the name of a launcher that was killed may stay taken for a while
        name = actor_name(self._run_id, spec.name, self._started)
        options = {"name": name, "lifetime": "detached", "num_cpus": 0, "num_gpus": spec.num_gpus}
        launcher = self._ray.remote(Launcher).options(**options).remote()
        self._launchers[spec.name] = launcher
        self._running.add(spec.name)
        environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PYTHONUNBUFFERED": "1", **spec.environment}
        log = str(self._logs / f"{spec.name}.log")
        start = launcher.start.remote(list(spec.command), environment, log, self._grace_s)
        try:
            self.pids[spec.name] = self._ray.get(start, timeout=START_TIMEOUT_S)
        except self._ray.exceptions.RayError as error:
            self._release(spec.name)
            raise ProcessDied(f"{spec.name} could not be started: {str(error).splitlines()[0]}", process=spec.name) from error

    @property
    def running(self) -> set[str]:
        """Names of the processes not known to have ended."""
        return set(self._running)

    def poll(self) -> list[Exit]:
        """Processes that ended since the last call; their launchers are released."""
        exits = []
        calls = {name: self._launchers[name].state.remote() for name in sorted(self._running)}
        for name, call in calls.items():
            state = self._state(call)
            if state.exit_code is not None:
                exits.append(Exit(name=name, code=state.exit_code, last_line=state.last_line))
                self._release(name)
        return exits

    def terminate(self, names: Iterable[str]) -> None:
        """Asks processes to end; does not wait."""
        for name in sorted(set(names) & self._running):
            self._launchers[name].terminate.remote()

    def wait(self, names: Iterable[str], timeout_s: float) -> list[Exit]:
        """Waits until the named processes ended or the time is over; returns those that ended."""
        waiting, exits, end = set(names) & self._running, [], time.monotonic() + timeout_s
        while waiting and time.monotonic() < end:
            exits += self.poll()
            waiting &= self._running
            time.sleep(0.1)
        return exits

    def kill_all(self) -> None:
        """Ends whatever still runs, with everything below it."""
        calls = [self._launchers[name].kill.remote() for name in self._running]
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(calls, timeout=CALL_TIMEOUT_S)
        for name in list(self._running):
            self._release(name)

    def _state(self, call: Any) -> ProcessState:
        try:
            state: ProcessState = self._ray.get(call, timeout=CALL_TIMEOUT_S)
        except self._ray.exceptions.RayError as error:
            return ProcessState(pid=0, exit_code=LAUNCHER_LOST, last_line=str(error).splitlines()[0])
        return state

    def _release(self, name: str) -> None:
        self._running.discard(name)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._launchers.pop(name))
