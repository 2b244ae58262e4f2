"""Writes one JSON object per training step, and TensorBoard scalars beside it.

Consumes the learner's step metrics; produces ``metrics.jsonl`` and event files; waits for nothing.
"""

from __future__ import annotations

import json
import math
from typing import Any, TextIO

from asyncrl.config.run_dir import RunDir

__all__ = ["REQUIRED_FIELDS", "MetricsWriter"]

REQUIRED_FIELDS = (
    "step",
    "policy_version",
    "reward_mean",
    "staleness_mean",
    "staleness_max",
    "staleness_hist",
    "trained_groups",
    "trained_tokens",
    "generator_tokens_per_s",
    "learner_tokens_per_s",
    "queue_groups",
    "sync_s",
    "mismatch_kl",
    "wall_s",
)


class MetricsWriter:
    """Appends step metrics to ``metrics.jsonl``; steps beyond the starting one are cut off first.

    Args:
        run_dir: where the files lie.
        tensorboard: also write event files.
        start_step: steps that the starting weights contain; a resumed run continues the file after it.

    Raises:
        KeyError: a step without one of ``REQUIRED_FIELDS``.
    """

    def __init__(self, run_dir: RunDir, tensorboard: bool, start_step: int = 0) -> None:
        _truncate(run_dir, start_step)
        self._file: TextIO = run_dir.metrics.open("a", encoding="utf-8")
        self._board: Any = _board(run_dir, start_step) if tensorboard else None

    def write(self, step: dict[str, Any]) -> None:
        """Writes one step; nested histograms get string keys, non-finite numbers become null."""
        missing = [name for name in REQUIRED_FIELDS if name not in step]
        if missing:
            raise KeyError(f"step metrics lack {', '.join(missing)}")
        self._file.write(json.dumps(_plain(step), allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in step.items():
                if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                    self._board.add_scalar(f"train/{name}", value, int(step["step"]))
            self._board.flush()

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _board(run_dir: RunDir, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir.tensorboard), purge_step=start_step + 1 if start_step else None)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _truncate(run_dir: RunDir, start_step: int) -> None:
    if not run_dir.metrics.exists():
        return
    lines = run_dir.metrics.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= start_step]
    if len(kept) != len(lines):
        run_dir.metrics.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
