"""What each request does: the broker without its socket.

Consumes decoded requests, produces replies; a request that must wait gets none yet and is asked again after every
change, until its last call. The gate decides, the store keeps payload, dead letters go to their file.

Source: design note, section 4; faults B51, B53, B56.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import DataError, FencedError, QueueError, SchemaError, UnknownSession
from asyncrl.queue import messages as m
from asyncrl.queue.dead_letters import DeadLetters
from asyncrl.queue.ledger import split_frontier
from asyncrl.queue.opening import Opened, take_back
from asyncrl.queue.prompts import TicketPrompts
from asyncrl.queue.puts import Puts
from asyncrl.queue.records import Blocked, LeaseGranted
from asyncrl.queue.sessions import Session
from asyncrl.trajectory import SCHEMA_VERSION

__all__ = ["Answer", "Call", "QueueService"]

log = logging.getLogger(__name__)

MAX_TICKETS = 256
MAX_EXTRA = 1 << 16
MAX_REASON = 2000
AGAIN_S = 1.0  # a held put comes again within half a second
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
    """Answers requests to one broker.

    Args:
        opened: gate, payload and ledger, as they were found.

    Attributes:
        refused: refusals by kind. exiting: a stop with ``exit`` was answered.
    """

    def __init__(self, opened: Opened, prompts: TicketPrompts, run_dir: RunDir, incarnation: int) -> None:
        self.gate = opened.gate
        self.refused: Counter[str] = Counter()
        self.exiting = False
        self._store, self._journal = opened.store, opened.journal
        self._puts = Puts(opened.store, self.refused)
        self._prompts = prompts
        self._dead_letters = DeadLetters(run_dir.dead_letter)
        self._incarnation = incarnation
        self._told_to_advance: dict[str, int] = {}
        self._expired_s = math.inf
        for name, known in self.gate.fleet.remembered().items():
            if not known.alive:
                self._store.owner_gone(name, self._alone)

    def greet(self, sender: str, hello: m.Hello, now_s: float) -> m.Welcome:
        """A client introduces itself.

        Raises:
            FencedError: a consumer or producer of an older start of the run.
        """
        if hello.schema != SCHEMA_VERSION:
            raise SchemaError(
                f"this queue holds trajectories of schema {SCHEMA_VERSION}; {sender} has {hello.schema}: upgrade the older side"
            )
        if hello.role is m.Role.CONSUMER:
            self._greet_consumer(hello, now_s)
        elif hello.role is m.Role.PRODUCER:
            if hello.incarnation != self._incarnation:
                raise FencedError(f"this start of the run is incarnation {self._incarnation}; {sender} is of {hello.incarnation}: end it")
            if not hello.again:
                self._store.owner_new(sender, self._alone)
            if not (hello.again and self.gate.hello_again(sender, hello.tickets, now_s)):
                self.gate.hello(sender, now_s)
            self._told_to_advance = {name: v for name, v in self._told_to_advance.items() if name != sender and self.gate.fleet.knows(name)}
        return self.welcome()

    def greet_again(self, session: Session, hello: m.Hello, now_s: float) -> None:
        """A client lost messages and speaks on: tickets that it neither holds nor can still be told of are issued again."""
        if session.role is m.Role.PRODUCER:
            self.gate.hello_again(session.sender, (*hello.tickets, *session.granted()), now_s)
            self._settle()

    def _greet_consumer(self, hello: m.Hello, now_s: float) -> None:
        self.gate.fence(hello.incarnation)
        if hello.restore is None:
            return
        settings = self.gate.settings
        frontier = split_frontier(hello.restore, settings.shard, settings.shards)
        if frontier.steps > self.gate.frontier().steps:
            raise QueueError(
                f"a restore goes back; this queue has committed {self.gate.frontier().steps} steps, and the checkpoint has "
                f"{frontier.steps}: start the queue from that checkpoint"
            )
        if frontier != self.gate.frontier():
            self.gate = take_back(self.gate, self._store, self._journal, frontier, self._incarnation, now_s)

    def remembers(self, sender: str, role: m.Role) -> bool:
        """Whether a client that has greeted need not introduce itself again: a producer may have been forgotten."""
        return role is not m.Role.PRODUCER or self.gate.fleet.remembers(sender)

    def welcome(self) -> m.Welcome:
        """What a known client is told, also when it greets twice."""
        return m.Welcome(protocol=m.PROTOCOL_VERSION, frontier=self.gate.frontier())

    def answer(self, session: Session, body: m.RequestBody, payloads: Sequence[Any], now_s: float, call: Call) -> Answer | None:
        """The reply and its payload frames; None while the request should wait (never at its last call).

        Raises:
            AsyncRLError: the request is refused.
        """
        if call in _FIRST:
            self._check_role(session, body)
            if not self.remembers(session.sender, session.role):
                raise UnknownSession(f"{session.sender} was silent for so long that others took its place: greet again")
            self.gate.fleet.seen(session.sender, now_s)
            self._store.owner_here(session.sender)
        reply: m.ReplyBody | None
        frames: list[Any] = []
        match body:
            case m.TicketRequest():
                reply = self._tickets(session.sender, body, now_s, call)
            case m.LeaseRequest():
                reply = self._lease(body, now_s, call)
            case m.Put():
                reply = self._put(session.sender, body, payloads, now_s)
            case m.Fetch():
                items, frames = self._store.fetch(body.tickets, body.files)
                reply = m.Payloads(groups=items)
            case _:
                reply = self._plain(session.sender, body, now_s)
        self._settle()
        return None if reply is None else (reply, frames)

    def expire(self, now_s: float, *, unheard: bool = False) -> list[str]:
        """Lets time pass; says what it ended. Time in which puts were held, or nobody was heard, ends nothing."""
        if unheard or self._puts.full:
            self.gate.postpone(max(0.0, now_s - self._expired_s), unheard=unheard)
        self._expired_s = now_s
        for name in self.gate.fleet.silent(now_s, self.gate.settings.dead_after_s):
            self._store.owner_gone(name, self._alone)
        said = self.gate.expire(now_s)
        said += self._give_up_what_died()
        self._settle()
        self._dead_letters.write()
        if self._puts.full and not self._store.refusal(self._puts.needed_bytes):
            self._puts.full = ""
            self.gate.postpone(AGAIN_S, unheard=False)
            said.append("the disk has room again")
        self.gate.hold(self._puts.full)
        return said

    def _give_up_what_died(self) -> list[str]:
        """Groups that wait with a payload whose producer is dead are sampled again."""
        said = []
        for owner, tickets in self._store.kept_by().items():
            if not self.gate.fleet.knows(owner):
                lost = self.gate.lose(tickets, f"it died with its producer {owner}".rstrip())
                said += [f"{lost} finished groups died with their producers: they are sampled again"] if lost else []
        return said

    def commit(self) -> None:
        """Makes what was answered since the last call recoverable.

        Raises:
            DiskFull: nothing was written; the answers must wait.
        """
        self._journal.commit(self.gate, self._incarnation)

    def close(self, *, sweep: bool = True) -> None:
        """Frees files, and with ``sweep`` the run's shared memory."""
        self._dead_letters.write()
        self._journal.close()
        self._store.close(sweep=sweep)

    @property
    def monotone(self) -> bool:
        """Whether a producer that was refused a ticket speaks for all of its version and below."""
        return not self.gate.settings.lockstep

    def version_of(self, sender: str, body: m.RequestBody) -> int:
        """The version by which a waiting ticket request will be judged."""
        asked = body.version if isinstance(body, m.TicketRequest) else -1
        return max(asked, self.gate.fleet.version(sender)) if self.gate.fleet.knows(sender) else asked

    def deaths(self) -> int:
        """Producers that died so far: a lease that waits is answered when one more does."""
        return self.gate.fleet.deaths

    @property
    def _alone(self) -> bool:
        """Whether no other broker serves this run: only then is a segment that lies in no group here nobody's."""
        return self.gate.settings.shards == 1

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
                return m.Done(released=self._store.take_released(sender))
            case m.Fail():
                self.gate.fail(sender, body.ticket, body.attempt, body.reason[:MAX_REASON], body.final)
            case m.Commit():
                self.gate.commit(body.step, body.incarnation, body.priorities)
                self._settle()
                return m.Committed(frontier=self.gate.frontier(), status=self._status(now_s))
            case m.Return():
                damaged = [(ticket, attempt, reason[:MAX_REASON]) for ticket, attempt, reason in body.damaged]
                self.gate.return_(body.step, body.incarnation, damaged)
                self.refused["damaged"] += len(body.damaged)
            case m.Checkpointed():
                self.gate.fence(body.incarnation)
                self._journal.checkpointed(body.oldest_step)
            case m.ProducerGone():
                self.gate.producer_gone(body.name, now_s)
                self._store.owner_gone(body.name, self._alone)
            case m.StatusRequest():
                return m.Status(status=self._status(now_s))
            case m.Stop():
                self.gate.stop()
                self.exiting = self.exiting or body.exit
            case _:
                raise QueueError(f"{type(body).__name__} begins a conversation; {sender} has begun already")
        return m.Done()

    def _status(self, now_s: float) -> m.QueueStatus:
        return self.gate.status(now_s, dict(self.refused), self._store.log_bytes)

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
        answer = self.gate.lease(body.step, body.incarnation, now_s, max(0, min(body.extra, MAX_EXTRA)))
        if isinstance(answer, LeaseGranted):
            return m.Lease(step=answer.step, groups=answer.groups_G)
        if answer.ended or call in _LAST:
            return m.Lease(step=body.step, groups=(), blocked=answer.reason, ended=answer.ended)
        return None

    def _put(self, sender: str, body: m.Put, payloads: Sequence[Any], now_s: float) -> m.Outcomes:
        outcomes = self._puts.put(self.gate, sender, body, payloads, now_s)
        self.gate.hold(self._puts.full)
        self._settle()
        return m.Outcomes(outcomes=tuple(outcomes), released=self._store.take_released(sender))

    def _settle(self) -> None:
        for settled in self.gate.take_settled():
            self._journal.settled(settled)
            if settled.reason in (m.DropReason.DEAD_LETTER, m.DropReason.UNUSABLE):
                self._write_dead_letter(settled.ticket, settled.reason, settled.record.reasons)

    def _write_dead_letter(self, ticket: int, reason: str, reasons: Sequence[str]) -> None:
        try:
            prompt_id = self._prompts.prompt_id(ticket)
        except DataError as error:
            prompt_id = f"unreadable: {error}"
        entry = {"ticket": ticket, "prompt_id": prompt_id, "dropped": reason, "reasons": list(reasons)}
        log.warning("dropped ticket %d (%s) as %s: %s", ticket, prompt_id, reason, reasons[-1] if reasons else "no reason given")
        self._dead_letters.add(entry)


_ROLES: dict[type, m.Role] = {
    m.TicketRequest: m.Role.PRODUCER,
    m.Put: m.Role.PRODUCER,
    m.Fail: m.Role.PRODUCER,
    m.Heartbeat: m.Role.PRODUCER,
    m.LeaseRequest: m.Role.CONSUMER,
    m.Fetch: m.Role.CONSUMER,
    m.Commit: m.Role.CONSUMER,
    m.Return: m.Role.CONSUMER,
    m.Checkpointed: m.Role.CONSUMER,
    m.ProducerGone: m.Role.OBSERVER,
    m.Stop: m.Role.OBSERVER,
}
