"""The driver's side of the guardian: starts it, joins its Ray cluster, tells it when all is over."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import PeerTimeout, ProcessDied, StopRequested
from asyncrl.launch.guardian import DONE, connect, ray_environment, remove_traces, scratch_folder

__all__ = ["Head"]

START_S = 90.0
STOP_S = 20.0


class Head:
    """Context manager around the guardian of one run; ``ray`` is the connected module.

    Raises:
        ProcessDied: the guardian ended before Ray was up, with the end of its log.
        PeerTimeout: Ray was not up in time. StopRequested: ``asked_to_stop`` said so first.
    """

    def __init__(self, run_dir: RunDir, run_id: str, asked_to_stop: Callable[[], bool]) -> None:
        self._asked_to_stop = asked_to_stop
        self._run_dir = run_dir
        self._run_id = run_id
        self._address_file = run_dir.path / "ray.json"
        self._guardian: subprocess.Popen[bytes] | None = None
        self.ray: Any = None

    def __enter__(self) -> Head:
        self._address_file.unlink(missing_ok=True)
        ray_environment(scratch_folder(self._run_id), own_head=not self._run_dir.read_config().launch.ray_address)
        with (self._run_dir.path / "guardian.log").open("ab") as log:
            self._guardian = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.launch.guardian", str(self._run_dir.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.ray = connect(self._wait_for_address(), self._run_id)
        except BaseException:  # an interrupt included: the guardian must not outlive a failed start
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.ray is not None:
            self.ray.shutdown()
        if self._guardian is None or self._guardian.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._guardian.stdin.write(DONE)
            self._guardian.stdin.close()
        try:
            self._guardian.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait(5.0)
        remove_traces(self._run_id)

    def alive(self) -> bool:
        """Whether the guardian still runs."""
        return self._guardian is not None and self._guardian.poll() is None

    def _wait_for_address(self) -> str:
        assert self._guardian is not None
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._address_file.exists():
                return str(json.loads(self._address_file.read_text())["address"])
            if self._asked_to_stop():
                raise StopRequested("asked to stop while the Ray head came up")
            if not self.alive():
                raise ProcessDied(f"the Ray head did not start: {self._log_end()}", process="guardian")
            time.sleep(0.05)
        raise PeerTimeout(f"the Ray head was not up after {START_S:g} s: see {self._run_dir.path}/guardian.log", process="guardian")

    def _log_end(self) -> str:
        lines = (self._run_dir.path / "guardian.log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else f"exit code {self._guardian.returncode if self._guardian else '?'}"
