"""B58: the broker is killed with kill -9 at any step; relative to the checkpoint each prompt is trained exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from queue_run import broker, group_for, kill, new_run, restart, save_checkpoint

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import AsyncRLError
from asyncrl.queue.client import Consumer, Observer, Producer
from asyncrl.queue.messages import Committed, Ticket

pytestmark = pytest.mark.real

PROMPTS, GROUPS = 22, 4
NO_SIGNAL = {3, 11}


@dataclass
class Learner:
    """Weights are the list of tickets that went into them; a checkpoint is a copy of it and the queue's frontier."""

    weights: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    checkpoint: str = ""


async def generate(run_dir: RunDir, incarnation: int) -> None:
    """Finishes tickets newest first, and every fifth one only when nothing else is left to do."""
    producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-0")
    consumer_step = await asyncio.to_thread(watch, run_dir)
    held: list[Ticket] = []
    try:
        while True:
            version = await asyncio.to_thread(consumer_step)
            held += (await producer.tickets(version, 8, wait_s=0.05)).tickets
            ready = [t for t in held if t.ticket % 5] or held
            for ticket in reversed(ready):
                rewards = (1.0, 1.0) if ticket.ticket in NO_SIGNAL else (0.0, 1.0)
                version = max(version, ticket.not_before_version)
                await producer.put([group_for(ticket, version, rewards, incarnation=incarnation)])
                held.remove(ticket)
    finally:
        await producer.close()


def watch(run_dir: RunDir) -> Callable[[], int]:
    observer = Observer.connect(run_dir.read_config(), run_dir.read_facts(), "watch", timeout_s=10.0)
    return lambda: observer.status().step


def learn(run_dir: RunDir, learner: Learner, kill_at: tuple[int, str], process: subprocess.Popen[bytes]) -> bool:
    """Trains until the prompts end (True) or the broker is killed (False)."""
    with Consumer.connect(run_dir.read_config(), run_dir.read_facts(), "learner-0") as consumer:
        step = consumer.status().step

        def reached(point: str) -> bool:
            if (step, point) == kill_at:
                kill(process)
                return True
            return False

        while True:
            lease = consumer.lease(step, wait_s=1.0)
            if lease.ended:
                return True
            if not lease.groups:
                continue
            if reached("leased"):
                return False
            groups, damaged = consumer.fetch(lease.groups)
            assert not damaged
            if reached("fetched"):
                return False
            learner.weights += list(groups)
            committed: Committed = consumer.commit(step)
            step += 1
            if reached("committed"):
                return False
            if step % 2 == 0:
                learner.checkpoint = str(save_checkpoint(run_dir, committed.frontier))
                learner.saved = list(learner.weights)
                if reached("saved"):
                    return False


async def life(run_dir: RunDir, learner: Learner, incarnation: int, kill_at: tuple[int, str]) -> bool:
    with broker(run_dir) as process:
        generator = asyncio.create_task(generate(run_dir, incarnation))
        done = await asyncio.to_thread(learn, run_dir, learner, kill_at, process)
        generator.cancel()
        with contextlib.suppress(asyncio.CancelledError, AsyncRLError):
            await generator
        return done


@pytest.mark.parametrize("kill_at", [(0, "fetched"), (2, "saved"), (3, "leased"), (3, "committed"), (4, "fetched")])
def test_b58_each_prompt_is_trained_exactly_once_relative_to_the_checkpoint(tmp_path: Path, kill_at: tuple[int, str]) -> None:
    options = {
        "algorithm": {"groups_per_step": GROUPS},
        "queue": {"max_staleness": 3, "window": 4, "dead_after_s": 1.5},
        "task": {"size": PROMPTS, "epochs": 1},
    }
    run_dir = new_run(tmp_path, **options)
    learner = Learner()
    assert asyncio.run(life(run_dir, learner, 0, kill_at)) is False
    learner.weights = list(learner.saved)
    restart(run_dir, learner.checkpoint, incarnation=1)
    assert asyncio.run(life(run_dir, learner, 1, (-1, ""))) is True
    assert sorted(learner.weights) == sorted(set(range(PROMPTS)) - NO_SIGNAL)
