"""The whole broker under a flood, without its socket: gate, payload, log and ledger are real.

Consumes mutants through ``Broker.receive``; between them honest clients keep the queue moving, so that mutants meet live tickets,
leases and sessions. A broker is replaced after MESSAGES messages, since a mutant may be a valid message that ends its use, as the
hello of a newer learner is.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import SchemaError
from asyncrl.queue import messages as m
from asyncrl.queue.__main__ import new_broker
from asyncrl.queue.broker import Broker
from asyncrl.queue.wire import decode_envelope, decode_request
from benchmarks.queue_fuzz_messages import RUN_ID, header, put_of
from benchmarks.queue_mutator import Good

__all__ = ["BrokerTarget"]

MESSAGES = 5000
TURN = 25
LAST = 1 << 62  # a mutant may have begun a session with a number that has no successor
OTHERS = ("unsent", "damaged")  # counted by the broker beside messages and groups that it refused
KEYS = 4
Saying = tuple[str, m.RequestBody, list[bytes]]
_reply = msgspec.msgpack.Decoder(m.Reply)


class BrokerTarget:
    """See :class:`benchmarks.queue_fuzz.Target`.

    Attributes:
        steps: training steps that honest clients finished between the mutants. outcomes: of groups that were put.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = self._received = 0
        self._rng = random.Random(0)
        self._failures: list[str] = []
        self.steps = 0
        self.outcomes: Counter[str] = Counter()
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def receive(self, identity: bytes, frames: list[Any]) -> str:
        """See :class:`benchmarks.queue_fuzz.Target`."""
        refusal = self._deliver(identity, frames)[0]
        self._received += 1
        if self._received % MESSAGES == 0:
            self._end()
            self._begin()
        elif self._received % TURN == 0:
            self._turn()
        return refusal

    def good(self) -> Sequence[Good]:
        """What one of the honest clients could say next."""
        who, body, frames = self._rng.choice(self._sayings)()
        return [Good(self._identity(who), (header(RUN_ID, who, self._next(who), body), *frames))]

    def problems(self) -> list[str]:
        """See :class:`benchmarks.queue_fuzz.Target`."""
        self._check()
        return self._failures

    @property
    def _sayings(self) -> Sequence[Callable[[], Saying]]:
        step, now, version = self._gate.frontier().steps, self._incarnation, self._version
        keys = self._held[:2] or [(0, 0)]
        ticket, attempt = keys[0]
        return (
            lambda: ("generator-0", m.Hello(role=m.Role.PRODUCER), []),
            lambda: ("generator-0", m.TicketRequest(version=version, max_tickets=2, wait_s=0.0), []),
            lambda: ("generator-0", m.TicketRequest(version=version, max_tickets=2, wait_s=0.5), []),
            lambda: ("generator-0", m.Fail(ticket=ticket, attempt=attempt, reason="no answer"), []),
            lambda: ("generator-0", m.Heartbeat(version=version, in_flight={0: 3}, sampled_tokens=7), []),
            lambda: ("generator-0", *put_of(keys[:1], version)),
            lambda: ("generator-0", *put_of(keys, version)),
            lambda: ("learner-0", m.Hello(role=m.Role.CONSUMER, incarnation=now), []),
            lambda: ("learner-0", m.LeaseRequest(step=step, incarnation=now, wait_s=0.0), []),
            lambda: ("learner-0", m.Fetch(tickets=(ticket,)), []),
            lambda: ("learner-0", m.Commit(step=step, incarnation=now, priorities={ticket: 1.0}), []),
            lambda: ("learner-0", m.Return(step=step, incarnation=now, damaged=((ticket, attempt, "checksum"),)), []),
            lambda: ("learner-0", m.Checkpointed(oldest_step=step, incarnation=now), []),
            lambda: ("driver", m.ProducerGone(name="generator-1"), []),
            lambda: ("driver", m.StatusRequest(), []),
        )

    # one broker

    def _begin(self) -> None:
        path = self._folder / str(self._number)
        run_dir = RunDir(path)
        path.mkdir(parents=True)
        config = Config.model_validate(
            {"algorithm": {"groups_per_step": 4}, "queue": {"max_staleness": 4, "window": 4, "payload": "inline", "max_queued_groups": 64}}
        )
        run_dir.write_config(config)
        endpoints = {"queue_endpoints": (f"ipc://{path}/q",), "sync_endpoint": f"ipc://{path}/s", "rendezvous": "", "model_dir": ""}
        run_dir.write_facts(RunFacts(run_id=RUN_ID, incarnation=0, generator_device="cpu", learner_device="cpu", **endpoints))
        self._broker: Broker = new_broker(run_dir)
        self._service = self._broker._service
        self._counted: Counter[str] = Counter()
        self._groups_refused = 0
        self._lives: Counter[str] = Counter()
        self._held: list[tuple[int, int]] = []
        self._version = self._incarnation = 0
        self._number += 1
        self._turn()

    def _end(self) -> None:
        self._check()
        self._broker.ending = True
        try:
            self._broker.run()
        except Exception as error:  # noqa: BLE001 - a broker that cannot even end is a finding, and the flood goes on with a new one
            self._failures.append(f"broker {self._number} did not end in order: {error!r}")
        shutil.rmtree(self._folder / str(self._number - 1))

    def _check(self) -> None:
        """Refusals were counted by the broker as they were seen here, and its groups add up."""
        counted = sum(number for kind, number in self._service.refused.items() if kind not in OTHERS)
        if counted != self._counted.total() + self._groups_refused:
            self._failures.append(
                f"broker {self._number} counted {dict(self._service.refused)}; {dict(self._counted)} messages and "
                f"{self._groups_refused} groups were refused"
            )
        status = self._gate.status()
        if status.admitted != status.trained + sum(status.dropped.values()) + status.in_flight:
            self._failures.append(f"broker {self._number}: {status.admitted} admitted do not add up: {status}")
        if status.in_flight != status.generating + status.queued_groups + status.leased:
            self._failures.append(f"broker {self._number}: {status.in_flight} in flight do not add up: {status}")

    @property
    def _gate(self) -> Any:
        return self._service.gate

    def _deliver(self, identity: bytes, frames: list[Any]) -> tuple[str, m.ReplyBody | None]:
        """Refusal, and the reply to this message if it came at once."""
        cut, repeat = self._service.refused["cut_off"], self._is_repeat(identity, frames)
        self._broker.receive(identity, frames, time.monotonic())
        replies = self._replies()
        for body in replies:
            if isinstance(body, m.Outcomes) and not repeat:
                self.outcomes.update(outcome.partition(":")[0] for outcome in body.outcomes)
                self._groups_refused += sum(outcome.startswith("refused: ") for outcome in body.outcomes)
        refusals = [body.kind for body in replies if isinstance(body, m.Refused)]
        refusals += ["cut_off"] * (self._service.refused["cut_off"] - cut)
        if not repeat or refusals == ["cut_off"]:
            self._counted.update(refusals)
        return "".join(refusals[:1]), replies[0] if replies else None

    def _replies(self) -> list[m.ReplyBody]:
        found = [_reply.decode(reply[0]).body for _, reply in self._broker._outbox]
        self._broker._outbox.clear()
        for body in found:
            if isinstance(body, m.Tickets):  # also those that a mutant got: a ticket that nobody answers would hold the window up
                self._held += [
                    (ticket.ticket, ticket.attempt) for ticket in body.tickets if (ticket.ticket, ticket.attempt) not in self._held
                ]
        return found

    def _is_repeat(self, identity: bytes, frames: list[Any]) -> bool:
        """Whether the broker keeps its answer to this number of this session: then it says it again and counts nothing."""
        try:
            envelope = decode_envelope(frames[0])
            decode_request(frames[0])  # what cannot be read, or is for another queue, is refused before its number is looked at
        except (IndexError, SchemaError):
            return False
        if (envelope.protocol, envelope.run_id) != (m.PROTOCOL_VERSION, RUN_ID):
            return False
        session = self._broker._sessions._sessions.get(envelope.sender)
        return session is not None and session.identity == identity and bool(session._answers.get(envelope.sequence))

    # honest clients

    def _turn(self) -> None:
        with contextlib.suppress(_Gone):
            for who, role in (("generator-0", m.Role.PRODUCER), ("learner-0", m.Role.CONSUMER), ("driver", m.Role.OBSERVER)):
                self._greet(who, role)
            self._produce()
            self._train()
        self._broker._look_again(time.monotonic())
        self._counted.update(body.kind for body in self._replies() if isinstance(body, m.Refused))
        self._service.commit()

    def _produce(self) -> None:
        self._version = self._gate.frontier().steps
        self._say("generator-0", m.TicketRequest(version=self._version, max_tickets=KEYS, wait_s=0.0))
        ready, self._held = self._held[:-2], self._held[-2:]
        if ready:
            self._say("generator-0", *put_of(ready, self._version))

    def _train(self) -> None:
        step = self._gate.frontier().steps
        lease = self._say("learner-0", m.LeaseRequest(step=step, incarnation=self._incarnation, wait_s=0.0))
        if isinstance(lease, m.Lease) and lease.groups:
            self._say("learner-0", m.Commit(step=step, incarnation=self._incarnation))
            self.steps += self._gate.frontier().steps == step + 1
        self._version = self._gate.frontier().steps
        self._say("generator-0", m.Heartbeat(version=self._version, in_flight={}, sampled_tokens=0))

    def _greet(self, who: str, role: m.Role) -> None:
        session = self._broker._sessions._sessions.get(who)
        if session is not None and session.identity == self._identity(who) and session._last < LAST:
            return
        self._lives[who] += 1
        self._deliver(self._identity(who), [header(RUN_ID, who, 0, m.Hello(role=role, incarnation=self._incarnation))])

    def _say(self, who: str, body: m.RequestBody, frames: Sequence[bytes] = ()) -> m.ReplyBody | None:
        refusal, reply = self._deliver(self._identity(who), [header(RUN_ID, who, self._next(who), body), *frames])
        if refusal == "cut_off":
            self._lives[who] += 1
            raise _Gone
        return reply

    def _identity(self, who: str) -> bytes:
        return f"{who}.{self._lives[who]}".encode()

    def _next(self, who: str) -> int:
        session = self._broker._sessions._sessions.get(who)
        return min(session._last + 1, LAST) if session is not None else 0


class _Gone(Exception):
    """An honest client was cut off for what was said in its name; it comes back with the next turn."""
