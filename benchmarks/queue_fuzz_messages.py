"""Good messages of every kind, which the fuzzer mutates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from asyncrl.queue import messages as m
from asyncrl.queue.payload import checksum
from asyncrl.queue.wire import encode
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan, encode_group
from benchmarks.queue_mutator import Good

__all__ = ["RUN_ID", "good_messages", "group", "header", "put_of"]

RUN_ID = "run-a"


def group(ticket: int, attempt: int = 0, version: int = 0, siblings: int = 3, group_id: str = "") -> TrajectoryGroup:
    """A small good group with rewards that differ."""
    columns: dict[str, Any] = {
        "group_id": group_id or f"g{ticket}", "ticket": ticket, "attempt": attempt, "sample": 0, "prompt_id": "p", "seed": 1,
        "incarnation": 0, "input_ids": [1, 2, 3, 4, 5], "loss_mask": [False, False, True, True, True],
        "behavior_logprobs": [0.0, 0.0, -0.5, -0.5, -0.5], "version_spans": [VersionSpan(2, version)], "finish_reason": "stop",
        "temperature": 1.0, "generator": "generator-0", "engine": "fake", "dispatched_s": 0.0, "finished_s": 1.0,
        "reward_parts": {"exact": 1.0}, "extra": {"note": "ü"},
    }  # fmt: skip
    return TrajectoryGroup(trajectories=tuple(Trajectory.checked(**columns, sibling=i, reward=float(i)) for i in range(siblings)))


def good_messages(run_id: str = RUN_ID) -> list[Good]:
    """One good message of every kind, and puts of one and of two groups."""
    bodies: list[tuple[str, m.RequestBody, list[bytes]]] = [
        ("generator-0", m.Hello(role=m.Role.PRODUCER), []),
        ("generator-0", m.TicketRequest(version=0, max_tickets=2, wait_s=0.0), []),
        ("generator-0", m.Fail(ticket=1, attempt=0, reason="no answer"), []),
        ("generator-0", m.Heartbeat(version=0, in_flight={0: 3}, sampled_tokens=7), []),
        ("generator-0", *put_of([(0, 0)])),
        ("generator-0", *put_of([(0, 0), (1, 0)])),
        ("learner-0", m.Hello(role=m.Role.CONSUMER), []),
        ("learner-0", m.LeaseRequest(step=0, incarnation=0, wait_s=0.0), []),
        ("learner-0", m.Fetch(tickets=(0,)), []),
        ("learner-0", m.Commit(step=0, incarnation=0, priorities={0: 1.0}), []),
        ("learner-0", m.Return(step=0, incarnation=0, damaged=((0, 0, "checksum"),)), []),
        ("learner-0", m.Checkpointed(oldest_step=0, incarnation=0), []),
        ("driver", m.Hello(role=m.Role.OBSERVER), []),
        ("driver", m.ProducerGone(name="generator-1"), []),
        ("driver", m.StatusRequest(), []),
    ]
    return [Good(sender.encode(), (header(run_id, sender, n, body), *frames)) for n, (sender, body, frames) in enumerate(bodies)]


def put_of(keys: Sequence[tuple[int, int]], version: int = 0) -> tuple[m.Put, list[bytes]]:
    """A put of groups with these (ticket, attempt), sampled by ``version``, inline, one frame each."""
    made = [_item(ticket, attempt, version) for ticket, attempt in keys]
    return m.Put(groups=tuple(item for item, _ in made)), [frame for _, frame in made]


@functools.lru_cache(maxsize=256)
def _item(ticket: int, attempt: int, version: int) -> tuple[m.PutItem, bytes]:
    whole = group(ticket, attempt, version)
    frame = bytes(encode_group(whole))
    return m.PutItem(meta=whole.meta(payload_bytes=len(frame)), checksum=checksum([frame]), lengths=(len(frame),)), frame


def header(run_id: str, sender: str, sequence: int, body: m.RequestBody) -> bytes:
    """The first frame of a request."""
    return encode(m.Request(protocol=m.PROTOCOL_VERSION, run_id=run_id, sender=sender, sequence=sequence, body=body))
