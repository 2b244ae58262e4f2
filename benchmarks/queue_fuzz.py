"""A flood of malformed messages against whatever takes (identity, frames): ``python -m benchmarks.queue_fuzz``.

Consumes mutants of good messages; produces a :class:`Tally`. A refusal is an AsyncRLError; anything else that is raised
is a crash, kept with what repeats it. Memory is measured after a tenth of the messages and at the end.

Source: design note, section 4.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError
from asyncrl.queue import messages as m
from asyncrl.queue.payload import checksum
from asyncrl.queue.puts import check_frames, check_meta
from asyncrl.queue.wire import decode_envelope, decode_request, encode
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan, decode_group, encode_group
from benchmarks.queue_mutator import Good, Mutant, mutants

__all__ = ["Tally", "Target", "WireTarget", "flood", "good_messages", "group", "header", "main", "put_of"]

RUN_ID = "run-a"
MAX_GROWTH_BYTES = 64 << 20


class Target(Protocol):
    """What is fuzzed."""

    def receive(self, identity: bytes, frames: list[Any]) -> str:
        """Takes one message; the kind of refusal, or an empty text when it was accepted."""

    def good(self) -> Sequence[Good]:
        """Messages that it would accept now."""

    def problems(self) -> list[str]:
        """What does not hold in it, in sentences."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the messages; ``growth_bytes`` is that of resident memory after the first tenth.

    ``crashes``: by what was raised that is no refusal, the first message that did it.
    """

    seed: int
    sent: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    accepted_by_mutation: Counter[str] = field(default_factory=Counter)
    crashed: Counter[str] = field(default_factory=Counter)
    crashes: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    growth_bytes: int = 0
    peak_bytes: int = 0
    slowest_ms: float = 0.0
    slowest: str = ""
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """What must hold and does not."""
        said = list(self.failures)
        said += [f"{self.crashed[what]} times: {what}: {first}" for what, first in self.crashes.items()]
        if self.sent != self.accepted + self.refused.total() + self.crashed.total():
            said.append(f"{self.sent} sent, but {self.accepted} accepted and {self.refused.total()} refused")
        if self.growth_bytes > MAX_GROWTH_BYTES:
            said.append(f"resident memory grew by {self.growth_bytes >> 20} MiB; at most {MAX_GROWTH_BYTES >> 20} MiB are allowed")
        return said


class WireTarget:
    """The decoders alone: header, body, and the payloads of a put."""

    def __init__(self) -> None:
        self._good = good_messages()

    def good(self) -> Sequence[Good]:
        """See :class:`Target`."""
        return self._good

    def problems(self) -> list[str]:
        """Nothing is counted here."""
        return []

    def receive(self, identity: bytes, frames: list[Any]) -> str:
        """See :class:`Target`."""
        if not frames:
            return "no frames"
        try:
            decode_envelope(frames[0])
            request = decode_request(frames[0])
            if isinstance(request.body, m.Put):
                check_frames(request.body, frames[1:])
                for item in request.body.groups:
                    check_meta(item)
                for frame in frames[1:]:
                    decode_group(frame)
        except AsyncRLError as error:
            return type(error).__name__
        return ""


def flood(target: Target, num_messages: int, seed: int) -> Tally:
    """Sends ``num_messages`` mutants to the target."""
    tally = Tally(seed=seed)
    started_s, settled_bytes = time.monotonic(), 0
    for number, mutant in enumerate(mutants(target.good, seed)):
        if number == num_messages:
            break
        if number == num_messages // 10:
            settled_bytes = _resident_bytes()
        _one(target, mutant, number, tally)
    tally.growth_bytes = max(0, _resident_bytes() - settled_bytes)
    tally.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    tally.seconds = time.monotonic() - started_s
    tally.failures.extend(target.problems())
    return tally


def _one(target: Target, mutant: Mutant, number: int, tally: Tally) -> None:
    tally.sent += 1
    began_s = time.process_time()
    try:
        refusal = target.receive(mutant.identity, list(mutant.frames))
    except Exception as error:  # noqa: BLE001 - any error but a refusal is the finding sought here
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} in {Path(where.filename).name}:{where.name}"
        tally.crashed[what] += 1
        frames = [frame[:400].hex() for frame in mutant.frames[:2]]
        tally.crashes.setdefault(what, f"seed {tally.seed}, message {number}, {mutant.kind}: {str(error)[:200]}; frames {frames}")
        return
    finally:
        took_ms = (time.process_time() - began_s) * 1000
        if took_ms > tally.slowest_ms:
            tally.slowest_ms, tally.slowest = took_ms, f"message {number}, {mutant.kind}"
    if refusal:
        tally.refused[refusal] += 1
    else:
        tally.accepted += 1
        tally.accepted_by_mutation[mutant.kind] += 1


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


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one flood and prints its tally as JSON; exit code 1 if something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue_fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=["broker", "wire"], default="broker", help="the whole broker, or its decoders and payloads")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.target == "wire":
        tally = flood(WireTarget(), options.messages, options.seed)
    else:
        from benchmarks.queue_fuzz_broker import BrokerTarget

        with tempfile.TemporaryDirectory(prefix="asyncrl-fuzz-") as folder, BrokerTarget(Path(folder)) as target:
            tally = flood(target, options.messages, options.seed)
    print(json.dumps({each.name: getattr(tally, each.name) for each in fields(tally)}, indent=1))
    for problem in tally.problems:
        print(problem, file=sys.stderr)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
