"""What the driver looks at while a run is live, and the reasons for which it ends one."""

from __future__ import annotations

import json
import time
from typing import Any

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir
from asyncrl.errors import PeerTimeout
from asyncrl.launch.processes import is_broker
from asyncrl.launch.supervisor import Supervisor
from asyncrl.queue.client import Observer
from asyncrl.queue.messages import QueueStatus

__all__ = ["Watch"]


class Watch:
    """Follows metrics.jsonl and the queue's status.

    Args:
        started_s: monotonic time of the driver's start.
    """

    def __init__(self, run_dir: RunDir, config: Config, started_s: float) -> None:
        self._file = run_dir.metrics
        self._ending = run_dir.ending
        self._position = self._file.stat().st_size if self._file.exists() else 0
        self._config = config
        self._started_s = started_s
        self._progress_s = time.monotonic()
        self._last_status_s = 0.0
        self.metrics: dict[str, Any] | None = None

    def observe(self, observer: Observer, supervisor: Supervisor) -> QueueStatus | None:
        """Reads new metrics, and at most once per interval the queue's status."""
        self._read_metrics()
        now = time.monotonic()
        if now - self._last_status_s < self._config.monitor.interval_s or not any(map(is_broker, supervisor.running)):
            return None
        self._last_status_s = now
        try:
            return observer.status()
        except PeerTimeout:  # a dead broker is named by the supervisor's next poll
            return None

    def over(self, status: QueueStatus | None) -> tuple[str, str] | None:
        """Outcome and message when the run must end now, else None."""
        now = time.monotonic()
        limit_s = 60.0 * self._config.launch.max_minutes
        if limit_s and now - self._started_s > limit_s:
            return "finished", f"launch.max_minutes={self._config.launch.max_minutes:g} is over"
        stalled_s = now - self._progress_s
        if stalled_s > self._config.launch.stall_timeout_s:
            gate = status.blocked if status and status.blocked else "no gate is shut"
            sampling = f"{status.generating} groups being sampled, {status.queued_groups} queued" if status else "the queue is silent"
            return "failed", f"no training step for {stalled_s:.0f} s: {gate}; {sampling}"
        return None

    def ending(self) -> tuple[str, str]:
        """Outcome and message when the learner ended by itself, as it wrote them."""
        if not self._ending.exists():
            return "failed", "the learner ended without a word"
        found = json.loads(self._ending.read_text())
        return found["outcome"], f"{found['reason']}, at step {found['step']}"

    def _read_metrics(self) -> None:
        if not self._file.exists():
            return
        if self._file.stat().st_size < self._position:
            self._position = 0
        with self._file.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                self.metrics = json.loads(line)
                self._progress_s = time.monotonic()
