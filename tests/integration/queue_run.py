"""A run directory with a real broker process, and groups made by hand, for the queue's integration tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.queue.messages import Ticket
from asyncrl.queue.shm import SegmentKeeper
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan

ROOT = Path(__file__).parents[2]


def new_run(path: Path, checkpoint: str = "", incarnation: int = 0, **options: Any) -> RunDir:
    """Writes config and facts; ``options`` are config groups as dicts."""
    run_dir = RunDir(path)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    options.setdefault("queue", {}).setdefault("dead_after_s", 3.0)
    options["queue"].setdefault("heartbeat_s", 0.2)
    run_dir.write_config(Config.model_validate(options))
    return restart(run_dir, checkpoint, incarnation)


def restart(run_dir: RunDir, checkpoint: str, incarnation: int) -> RunDir:
    """Writes the facts of a start."""
    facts = RunFacts(
        run_id=f"t{zlib.crc32(str(run_dir.path).encode()):08x}",
        incarnation=incarnation,
        queue_endpoints=tuple(f"ipc://{run_dir.path}/q{incarnation}.{n}" for n in range(run_dir.read_config().queue.shards)),
        sync_endpoint=f"ipc://{run_dir.path}/s{incarnation}",
        rendezvous="tcp://127.0.0.1:1",
        model_dir="",
        generator_device="cpu",
        learner_device="cpu",
        checkpoint=checkpoint,
    )
    run_dir.write_facts(facts)
    return run_dir


def python(*arguments: str) -> subprocess.Popen[bytes]:
    """A process of this interpreter that finds the package and this folder."""
    paths = f"{ROOT}{os.pathsep}{Path(__file__).parent}"
    return subprocess.Popen([sys.executable, *arguments], env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE)


@contextlib.contextmanager
def broker(run_dir: RunDir, shard: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A real broker process, killed at the end if it still runs."""
    process = python("-m", "asyncrl.queue", str(run_dir.path), "--shard", str(shard))
    try:
        yield process
    finally:
        kill(process)
        SegmentKeeper(run_dir.read_facts().run_id).sweep(())


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9, and reap."""
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    if process.stderr is not None:
        process.stderr.close()


def group_for(ticket: Ticket, version: int, rewards: tuple[float, ...] = (0.0, 1.0), tokens: int = 3, **changes: Any) -> TrajectoryGroup:
    """A group of two-token prompts with ``tokens`` sampled tokens a sibling, all of ``version``."""
    size = 2 + tokens
    fields: dict[str, Any] = {
        "group_id": ticket.group_id,
        "ticket": ticket.ticket,
        "attempt": ticket.attempt,
        "sample": 0,
        "prompt_id": ticket.prompt_id,
        "seed": ticket.seed,
        "incarnation": 0,
        "input_ids": list(range(size)),
        "loss_mask": [False, False] + [True] * tokens,
        "behavior_logprobs": [0.0, 0.0] + [-0.5] * tokens,
        "version_spans": [VersionSpan(2, version)],
        "finish_reason": "stop",
        "temperature": 1.0,
        "generator": "generator-0",
        "engine": "fake",
        "dispatched_s": 0.0,
        "finished_s": 1.0,
    }
    fields.update(changes)
    return TrajectoryGroup(trajectories=tuple(Trajectory.checked(**{**fields, "sibling": i, "reward": r}) for i, r in enumerate(rewards)))


def save_checkpoint(run_dir: RunDir, frontier: Any) -> Path:
    """A checkpoint that holds the frontier alone, manifest last as the learner writes it."""
    import msgspec

    folder = run_dir.checkpoints / f"step-{frontier.steps:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"frontier": msgspec.to_builtins(frontier)}))
    return folder


def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    """Polls until the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.02)
