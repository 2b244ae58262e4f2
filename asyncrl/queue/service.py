"""What each request does: the broker without its socket.

Consumes decoded requests, produces replies; a request that must wait gets none yet and is asked again after every
change, until its last call. The gate decides, the store keeps payload, dead letters go to their file.

Source: design note, section 4; faults B51, B53, B56.
"""

from __future__ import annotations

import enum
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import AsyncRLError, DataError, FencedError, QueueError, SchemaError
from asyncrl.queue import messages as m
from asyncrl.queue.gate import Gate
from asyncrl.queue.prompts import TicketPrompts
from asyncrl.queue.records import Blocked, LeaseGranted
from asyncrl.queue.sessions import Session
from asyncrl.queue.store import PayloadStore
from asyncrl.queue.wire import checksum
from asyncrl.trajectory import GroupMeta, decode_group

__all__ = ["Answer", "Call", "QueueService"]

log = logging.getLogger(__name__)

MAX_TICKETS = 256
Answer = tuple[m.ReplyBody, list[Any]]


class Call(enum.Enum):
    """How often a request was looked at before, and whether it may still wait."""

    ONLY = "only"
    FIRST = "first"
    AGAIN = "again"
    LAST = "last"


_FIRST = (Call.ONLY, Call.FIRST)
_LAST = (Call.ONLY, Call.LAST)


class QueueService:
    """Answers requests of one run.

    Attributes:
        refused: refusals by kind. exiting: a stop with ``exit`` was answered.
    """

    def __init__(self, gate: Gate, prompts: TicketPrompts, run_dir: RunDir, incarnation: int) -> None:
        self.gate = gate
        self.refused: Counter[str] = Counter()
        self.exiting = False
        self._prompts = prompts
        self._run_dir = run_dir
        self._incarnation = incarnation
        self._store = PayloadStore()
        self._told_to_advance: dict[str, int] = {}

    def greet(self, sender: str, hello: m.Hello, now_s: float) -> m.Welcome:
        """A client introduces itself.

        Raises:
            FencedError: a consumer or producer of an older start of the run.
        """
        if hello.role is m.Role.CONSUMER:
            self.gate.fence(hello.incarnation)
        elif hello.role is m.Role.PRODUCER:
            if hello.incarnation != self._incarnation:
                raise FencedError(f"this start of the run is incarnation {self._incarnation}; {sender} is of {hello.incarnation}: end it")
            self.gate.hello(sender, now_s)
            self._told_to_advance.pop(sender, None)
        return self.welcome()

    def welcome(self) -> m.Welcome:
        """What a known client is told, also when it greets twice."""
        return m.Welcome(protocol=m.PROTOCOL_VERSION, step=self.gate.frontier().steps)

    def answer(self, session: Session, body: m.RequestBody, payloads: Sequence[Any], now_s: float, call: Call) -> Answer | None:
        """The reply and its payload frames; None while the request should wait (never at its last call).

        Raises:
            AsyncRLError: the request is refused.
        """
        if call in _FIRST:
            self._check_role(session, body)
            self.gate.fleet.seen(session.sender, now_s)
        reply: m.ReplyBody | None
        frames: list[Any] = []
        match body:
            case m.TicketRequest():
                reply = self._tickets(session.sender, body, now_s, call)
            case m.LeaseRequest():
                reply = self._lease(body, now_s, call)
            case m.Put():
                reply = self._put(session.sender, body, payloads)
            case m.Fetch():
                frames, sums = self._store.fetch(body.tickets)
                reply = m.Payloads(tickets=body.tickets, checksums=tuple(sums))
            case _:
                reply = self._plain(session.sender, body, now_s)
        self._settle()
        return None if reply is None else (reply, frames)

    def expire(self, now_s: float) -> list[str]:
        """Lets time pass; says what it ended."""
        said = self.gate.expire(now_s)
        self._settle()
        return said

    def deaths(self) -> int:
        """Producers that died so far: a lease that waits is answered when one more does."""
        return self.gate.fleet.deaths

    def _check_role(self, session: Session, body: m.RequestBody) -> None:
        allowed = _ROLES.get(type(body))
        if allowed is not None and session.role is not allowed:
            raise QueueError(f"{type(body).__name__} is for a {allowed.value}; {session.sender} said hello as a {session.role.value}")
        if session.role is m.Role.PRODUCER and session.incarnation != self._incarnation:
            raise FencedError(f"this start of the run is incarnation {self._incarnation}; {session.sender} is of {session.incarnation}")

    def _plain(self, sender: str, body: m.RequestBody, now_s: float) -> m.ReplyBody:
        match body:
            case m.Heartbeat():
                self.gate.heartbeat(sender, body.version, body.in_flight, body.sampled_tokens, now_s)
            case m.Fail():
                self.gate.fail(sender, body.ticket, body.attempt, body.reason, body.final)
            case m.Commit():
                self.gate.commit(body.step, body.incarnation)
                return m.Committed(frontier=self.gate.frontier(), status=self._status())
            case m.Return():
                self.gate.return_(body.step, body.incarnation)
            case m.ProducerGone():
                self.gate.producer_gone(body.name, now_s)
            case m.StatusRequest():
                return m.Status(status=self._status())
            case m.Stop():
                self.gate.stop()
                self.exiting = self.exiting or body.exit
            case _:
                raise QueueError(f"{type(body).__name__} begins a conversation; {sender} has begun already")
        return m.Done()

    def _status(self) -> m.QueueStatus:
        return self.gate.status(dict(self.refused))

    def _tickets(self, sender: str, body: m.TicketRequest, now_s: float, call: Call) -> m.Tickets | None:
        if body.max_tickets < 1:
            raise QueueError(f"a request asks for 1 ticket or more; met {body.max_tickets}")
        version = body.version
        if call not in _FIRST:
            if not self.gate.fleet.knows(sender):
                return m.Tickets(tickets=(), blocked=f"{sender} was taken for dead while it waited")
            version = max(version, self.gate.fleet.version(sender))
        tickets: list[m.Ticket] = []
        while len(tickets) < min(body.max_tickets, MAX_TICKETS):
            issue = self.gate.issue(sender, version, now_s)
            if isinstance(issue, Blocked):
                return self._no_more(sender, version, tickets, issue, call)
            try:
                tickets.append(self._prompts.ticket(issue))
            except DataError as error:
                self.gate.fail(sender, issue.ticket, issue.attempt, f"no prompt: {error}", final=True)
        return m.Tickets(tickets=tuple(tickets))

    def _no_more(self, sender: str, version: int, tickets: list[m.Ticket], why: Blocked, call: Call) -> m.Tickets | None:
        # told to advance once at once; then the producer waits like any other until its version has changed
        news = why.advance and self._told_to_advance.get(sender) != version
        if not (tickets or why.ended or news or call in _LAST):
            return None
        if why.advance:
            self._told_to_advance[sender] = version
        blocked = "" if tickets else why.reason
        return m.Tickets(tickets=tuple(tickets), blocked=blocked, advance=why.advance, stopping=why.ended)

    def _lease(self, body: m.LeaseRequest, now_s: float, call: Call) -> m.Lease | None:
        answer = self.gate.lease(body.step, body.incarnation, now_s)
        if isinstance(answer, LeaseGranted):
            return m.Lease(step=answer.step, groups=answer.groups_G)
        if answer.ended or call in _LAST:
            return m.Lease(step=body.step, groups=(), blocked=answer.reason, ended=answer.ended)
        return None

    def _put(self, sender: str, body: m.Put, payloads: Sequence[Any]) -> m.Outcomes:
        if not len(body.tickets) == len(body.checksums) == len(payloads):
            raise SchemaError(
                f"a put has one checksum and one payload a ticket; met {len(body.tickets)} tickets, {len(body.checksums)} checksums, "
                f"{len(payloads)} payloads"
            )
        outcomes = []
        for key, expected, payload in zip(body.tickets, body.checksums, payloads, strict=True):
            try:
                outcomes.append(self._put_one(sender, key, expected, payload))
            except AsyncRLError as error:
                self.refused[type(error).__name__] += 1
                outcomes.append(f"refused: {error}")
                log.warning("refused ticket %d, attempt %d, of %s: %s", *key, sender, error)
        return m.Outcomes(outcomes=tuple(outcomes))

    def _put_one(self, sender: str, key: tuple[int, int], expected: int, payload: Any) -> str:
        try:
            meta = _read(key, expected, payload)
        except SchemaError as error:
            self.gate.fail(sender, *key, f"payload refused: {error}")
            raise
        outcome = self.gate.finish(sender, meta)
        if outcome == "accepted":
            self._store.keep(meta.ticket, payload, expected)
        return outcome

    def _settle(self) -> None:
        for settled in self.gate.take_settled():
            self._store.forget(settled.ticket)
            if settled.reason in (m.DropReason.DEAD_LETTER, m.DropReason.UNUSABLE):
                self._write_dead_letter(settled.ticket, settled.reason, settled.reasons)

    def _write_dead_letter(self, ticket: int, reason: str, reasons: tuple[str, ...]) -> None:
        try:
            prompt_id = self._prompts.prompt_id(ticket)
        except DataError as error:
            prompt_id = f"unreadable: {error}"
        entry = {"ticket": ticket, "prompt_id": prompt_id, "dropped": reason, "reasons": list(reasons)}
        log.warning("dropped ticket %d (%s) as %s: %s", ticket, prompt_id, reason, reasons[-1] if reasons else "no reason given")
        with self._run_dir.dead_letter.open("a") as file:
            file.write(json.dumps(entry) + "\n")


_ROLES: dict[type, m.Role] = {
    m.TicketRequest: m.Role.PRODUCER,
    m.Put: m.Role.PRODUCER,
    m.Fail: m.Role.PRODUCER,
    m.Heartbeat: m.Role.PRODUCER,
    m.LeaseRequest: m.Role.CONSUMER,
    m.Fetch: m.Role.CONSUMER,
    m.Commit: m.Role.CONSUMER,
    m.Return: m.Role.CONSUMER,
    m.ProducerGone: m.Role.OBSERVER,
    m.Stop: m.Role.OBSERVER,
}


def _read(key: tuple[int, int], expected: int, payload: Any) -> GroupMeta:
    met = checksum(payload)
    if met != expected:
        raise SchemaError(f"payload of ticket {key[0]} has CRC-32 {expected}; met {met}: it was damaged on the way", ticket=key[0])
    try:
        meta = decode_group(payload).meta(payload_bytes=len(payload))
    except SchemaError:
        raise
    except Exception as error:  # bytes from outside, whatever they do to a decoder, must not end the broker
        raise SchemaError(f"payload of ticket {key[0]} cannot be read: {error!r}", ticket=key[0]) from error
    if (meta.ticket, meta.attempt) != key:
        raise SchemaError(f"header and payload name one ticket and attempt; met {key} and {(meta.ticket, meta.attempt)}", ticket=key[0])
    return meta
