"""A producer and a consumer that may be killed anywhere: what they know for certain is in files before they go on.

The producer consumes tickets and produces groups, and a line in its acknowledgements for each group that the queue took. The consumer
consumes batches and produces weights: the list of the groups that went into them, saved whole with the queue's frontier. Both wait for the
broker alone, for which a dead one that comes back is as good.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.config.run_dir import RunDir, write_atomic
from asyncrl.errors import PeerTimeout, VersionError
from asyncrl.queue.client import Consumer, Observer, Producer
from asyncrl.queue.ledger import EMPTY
from asyncrl.queue.messages import Frontier, Ticket
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan

__all__ = ["Weights", "consume", "group_of", "has_signal", "produce"]

CONNECT_S = 20.0
TICKET_WAIT_S = 0.05
LEASE_WAIT_S = 0.3
TICKETS = 4
SAVE_EVERY = 2
LARGE_TOKENS = 12_000

T = TypeVar("T")


class Weights(msgspec.Struct, kw_only=True):
    """What a checkpoint holds: (ticket, attempt) of each group trained, and the frontier that goes with them."""

    trained: list[tuple[int, int]] = []
    frontier: Frontier = EMPTY

    @classmethod
    def load(cls, folder: Path) -> Weights:
        """Those of the last checkpoint; fresh ones if there is none."""
        file = folder / "weights.json"
        return msgspec.json.decode(file.read_bytes(), type=cls) if file.exists() else cls()


class Lines:
    """A file of which each line is there once it was written, whatever becomes of this process."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *values: Any) -> None:
        """Adds a line."""
        os.write(self._fd, json.dumps(values).encode() + b"\n")


def has_signal(ticket: int) -> bool:
    """Whether the rewards of a ticket differ."""
    return ticket % 11 != 7


def group_of(ticket: Ticket, version: int, seed: int) -> TrajectoryGroup:
    """A group that tells its ticket and attempt by its tokens, of 3 to 300 of them, and now and then of many."""
    rng = random.Random(f"{seed} {ticket.ticket} {ticket.attempt}")
    tokens = LARGE_TOKENS if rng.random() < 0.1 else rng.randint(3, 300)
    fields: dict[str, Any] = {
        "group_id": ticket.group_id, "ticket": ticket.ticket, "attempt": ticket.attempt, "sample": 0, "prompt_id": ticket.prompt_id,
        "seed": ticket.seed, "incarnation": 0, "input_ids": [ticket.ticket, ticket.attempt] + [rng.randrange(1000)] * tokens,
        "loss_mask": [False, False] + [True] * tokens, "behavior_logprobs": [0.0, 0.0] + [-rng.random()] * tokens,
        "version_spans": [VersionSpan(2, version)], "finish_reason": "stop", "temperature": 1.0, "generator": "generator", "engine": "fake",
        "dispatched_s": 0.0, "finished_s": 1.0,
    }  # fmt: skip
    rewards = (0.0, 1.0) if has_signal(ticket.ticket) else (1.0, 1.0)
    return TrajectoryGroup(trajectories=tuple(Trajectory.checked(**fields, sibling=i, reward=r) for i, r in enumerate(rewards)))


async def produce(folder: Path, name: str, seed: int) -> None:
    """Samples until the queue was stopped."""
    run_dir, said = RunDir(folder), Lines(folder / f"acks-{name}.jsonl")
    config, facts = run_dir.read_config(), run_dir.read_facts()
    observer = Observer.connect(config, facts, f"eye-{name}", CONNECT_S)
    producer = await Producer.connect(config, facts, name, CONNECT_S)

    async def deliver(ticket: Ticket, version: int) -> None:
        group = group_of(ticket, max(version, ticket.not_before_version), seed)
        while True:
            try:
                (outcome,) = await producer.put([group])
            except PeerTimeout:
                said.write("timeout", "put")
                continue
            said.write(outcome, ticket.ticket, ticket.attempt)
            return

    while True:
        try:
            version = observer.status().step
            await producer.heartbeat(version, {}, 0)
            answer = await producer.tickets(version, TICKETS, TICKET_WAIT_S)
        except VersionError:  # the learner went back to its checkpoint since we looked
            continue
        except PeerTimeout:
            said.write("timeout", "tickets")
            continue
        if answer.stopping:
            return
        await asyncio.gather(*(deliver(ticket, version) for ticket in answer.tickets))


def consume(folder: Path, incarnation: int, point: Callable[[str], None]) -> None:
    """Trains from the last checkpoint on until no batch will come, and saves.

    Args:
        point: called by name between what a learner does in turn.
    """
    run_dir, said, weights = RunDir(folder), Lines(folder / "consumer.jsonl"), Weights.load(folder)
    facts = run_dir.read_facts().model_copy(update={"incarnation": incarnation})
    step = weights.frontier.steps
    with Consumer.connect(run_dir.read_config(), facts, "learner-0", CONNECT_S, restore=weights.frontier) as consumer:
        point("greeted")
        while True:
            lease = _insist(said, consumer.lease, step, LEASE_WAIT_S)
            if lease.ended:
                break
            if not lease.groups:
                continue
            point("leased")
            groups, damaged = _insist(said, consumer.fetch, lease.groups)
            if damaged:
                raise AssertionError(f"payload was damaged: {damaged}")
            point("fetched")
            weights.trained += [_told(ticket, group) for ticket, group in groups.items() if has_signal(ticket)]
            point("trained")
            weights.frontier = _insist(said, consumer.commit, step).frontier
            point("committed")
            step += 1
            if step % SAVE_EVERY == 0:
                _save(folder, weights, point)
                _insist(said, consumer.checkpointed, step)
                point("told")
        _save(folder, weights, point)


def _save(folder: Path, weights: Weights, point: Callable[[str], None]) -> None:
    point("saving")
    write_atomic(folder / "weights.json", msgspec.json.encode(weights).decode())
    point("saved")


def _told(ticket: int, group: TrajectoryGroup) -> tuple[int, int]:
    first = group.trajectories[0]
    told = (int(first.input_ids[0]), int(first.input_ids[1]))
    if told != (ticket, first.attempt):
        raise AssertionError(f"ticket {ticket}, attempt {first.attempt}, came with the tokens of {told}")
    return told


def _insist(said: Lines, call: Callable[..., T], *arguments: Any) -> T:
    """The answer, however often the broker was too slow in coming back."""
    while True:
        try:
            return call(*arguments)
        except PeerTimeout:
            said.write("timeout", "consumer")
