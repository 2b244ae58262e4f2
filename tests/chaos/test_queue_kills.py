"""B58: kill -9 of brokers within their writes, of producers and of consumers; two hundred of each: ``python -m benchmarks.queue_kills``."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.queue_kills import MODES, KillRun

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("mode", "payload", "points"), [("broker", "inline", 13), ("broker", "shm", 12), ("clients", "shm", 25), ("all", "inline", 12)]
)
def test_b58_what_was_acknowledged_is_trained_once_whoever_is_killed(tmp_path: Path, mode: str, payload: str, points: int) -> None:
    with KillRun(tmp_path, MODES[mode], payload, seed=1) as run:
        tally = run.run(points)
    print(tally.line())
    assert tally.problems == []
    assert tally.killed.total() >= points
    assert tally.acknowledged > 0 and tally.trained > 0
