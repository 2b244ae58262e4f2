"""The live line of a run: one line rewritten in place on a terminal, a plain line per step elsewhere.

The cursor is never hidden and no terminal mode is changed, so nothing is lost when the driver is killed.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any, TextIO

from asyncrl.queue.messages import QueueStatus

__all__ = ["LiveView"]


class LiveView:
    """Shows progress.

    Args:
        mode: ``auto``, ``line``, ``plain`` or ``off``.
        steps: training steps of the run.
        stream: where to write.
    """

    def __init__(self, mode: str, steps: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        terminal = self._stream.isatty()
        self._mode = mode if mode != "auto" else ("line" if terminal else "plain")
        self._steps = steps
        self._last_step = -1
        self._last_phase = ""
        self._open = False

    def update(self, phase: str, metrics: dict[str, Any] | None, status: QueueStatus | None) -> None:
        """Shows the latest step's metrics and the queue's state of the moment."""
        if self._mode == "line":
            width = shutil.get_terminal_size().columns
            self._stream.write("\r\x1b[K" + self.line(phase, metrics, status)[: max(20, width - 1)])
            self._stream.flush()
            self._open = True
        elif self._mode == "plain":
            self._plain(phase, metrics, status)

    def say(self, text: str) -> None:
        """Writes a whole line of its own."""
        if self._open:
            self._stream.write("\r\x1b[K")
            self._open = False
        self._stream.write(f"asyncrl: {text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Leaves the cursor at the start of a fresh line."""
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False

    def line(self, phase: str, metrics: dict[str, Any] | None, status: QueueStatus | None) -> str:
        """The text of one update."""
        parts = [phase] if metrics is None else _step_parts(metrics, self._steps)
        if status is not None:
            parts.append(f"queue {status.queued_groups}")
            parts.append(f"waits: {_who_waits(status)}")
        return " | ".join(parts)

    def _plain(self, phase: str, metrics: dict[str, Any] | None, status: QueueStatus | None) -> None:
        step = int(metrics["step"]) if metrics else -1
        if step > self._last_step or (metrics is None and phase != self._last_phase):
            self._last_step, self._last_phase = step, phase
            self._stream.write(self.line(phase, metrics, status) + "\n")
            self._stream.flush()


def _step_parts(m: dict[str, Any], steps: int) -> list[str]:
    return [
        f"step {m['step']}/{steps}",
        f"reward {_number(m['reward_mean'], '.3f')}",
        f"version {m['policy_version']}",
        f"stale {_number(m['staleness_mean'], '.2f')} max {m['staleness_max']}",
        f"gen {_number(m['generator_tokens_per_s'], '.0f')} tok/s",
        f"learn {_number(m['learner_tokens_per_s'], '.0f')} tok/s",
        f"sync {_number(m['sync_s'], '.2f')} s",
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _who_waits(status: QueueStatus) -> str:
    if status.blocked:
        return status.blocked
    if status.leased == 0 and status.generating:
        return f"learner for {status.generating} groups being sampled"
    return "nobody"
