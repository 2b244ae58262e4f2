"""The broker's socket and its one loop.

    socket → check protocol, run, session, number → service → answers in memory ─┐
       ↑  a burst of messages, then once: ledger and log (group commit) ←─────────┘
       └─ only then the replies of the burst are sent

Consumes requests of producers, consumer and observers; produces replies. It waits for messages, and for the disk once a burst:
producers and learner unblock each other through the gate. While the ledger cannot be written no reply goes out and no message is
read, so that every client is held back, and that time counts for no deadline and no silence. A broker to whom nobody speaks any
more ends by itself.

Source: design note, sections 3 and 4; fault B56.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from asyncrl.config import Config
from asyncrl.config.network import check_exposure
from asyncrl.config.run_dir import RunFacts
from asyncrl.errors import AsyncRLError, ConfigError, DiskFull, LostMessage, QueueError, SchemaError
from asyncrl.queue.curve import Guard, key_holder, secure_server
from asyncrl.queue.keys import SERVER_NAME
from asyncrl.queue.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    LeaseRequest,
    ProducerGone,
    Refused,
    Reply,
    ReplyBody,
    Request,
    TicketRequest,
    Tickets,
)
from asyncrl.queue.service import Call, QueueService
from asyncrl.queue.sessions import Arrival, Session, Sessions
from asyncrl.queue.waiting import Waiting, WaitingRoom
from asyncrl.queue.wire import Envelope, decode_envelope, decode_request, encode, worth_saying

__all__ = ["Broker"]

log = logging.getLogger(__name__)

TICK_S = 0.1
BURST = 128
RECEIVE_HWM = 16
SEND_HWM = 1000
LINGER_MS = 1000
MAX_VIOLATIONS = 256
MAX_VIOLATORS = 4096
SAY_EVERY_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Broker:
    """One ROUTER socket; binds at construction.

    Args:
        service: answers requests.
        endpoint: where to listen.
        patient: serve on however long nobody speaks to it.

    Raises:
        QueueError: the endpoint cannot be bound. ConfigError: its keys cannot be used.
    """

    def __init__(self, config: Config, facts: RunFacts, service: QueueService, endpoint: str, *, patient: bool = False) -> None:
        self._facts = facts
        self._endpoint = endpoint
        self._service = service
        self._sessions = Sessions()
        self._room = WaitingRoom()
        self._epoch = -1
        self._spoke: dict[str, None] = {}
        self._outbox: list[tuple[bytes, Sequence[Any]]] = []
        self._violations: OrderedDict[bytes, int] = OrderedDict()
        self._disk_full = ""
        self._longest_wait_s = config.queue.dead_after_s
        self._silence_s = math.inf if patient else config.generator.start_timeout_s + config.queue.dead_after_s
        self._heard_s = self._said_s = self._ticked_s = time.monotonic()
        self.ending = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._guard: Guard | None = None
        self._bind(config.queue.max_message_mib << 20, config.queue.keys)

    def run(self) -> int:
        """Serves until it is told to end. Returns 0, or 1 when nobody spoke to it for too long."""
        in_order = silent = False
        try:
            while not (silent or self.ending or (self._service.exiting and not self._outbox)):
                silent = self._turn()
            if not silent:
                self._commit()
            in_order = True
        finally:
            self._close(LINGER_MS)
            self._service.close(sweep=in_order)
        return int(silent)

    def _turn(self) -> bool:
        """One burst; True when nobody has spoken for too long."""
        if self._disk_full:
            time.sleep(TICK_S)
        elif self._poll():
            self._drain()
        now_s = time.monotonic()
        if now_s - self._ticked_s >= TICK_S:
            self._ticked_s = now_s
            for line in self._service.expire(now_s, unheard=bool(self._disk_full)):
                log.warning(line)
            self._say(now_s)
        self._look_again(now_s)
        self._commit()
        if now_s - self._heard_s > self._silence_s:
            log.error("nobody has spoken to the queue at %s for %.0f s: it ends", self._endpoint, self._silence_s)
            return True
        return False

    def _commit(self) -> None:
        """Makes the burst recoverable, then answers it."""
        try:
            self._service.commit()
        except DiskFull as error:
            if not self._disk_full:
                log.error("every client is held back: %s", error)
            self._disk_full = str(error)
            return
        if self._disk_full:
            log.info("the ledger can be written again")
            self._disk_full, self._heard_s = "", time.monotonic()
        outbox, self._outbox = self._outbox, []
        for identity, frames in outbox:
            self._send(identity, frames)

    def _poll(self) -> bool:
        """Waits for a message, and lets newcomers in meanwhile."""
        if self._guard is None:
            return bool(self._socket.poll(int(TICK_S * 1000)))
        ready = dict(self._poller.poll(int(TICK_S * 1000)))
        self._guard.answer(time.monotonic())
        self._service.refused.update(self._guard.refused)
        self._guard.refused.clear()
        return self._socket in ready

    def _close(self, linger_ms: int) -> None:
        if self._guard is None:
            self._socket.close(linger=linger_ms)
        else:
            self._guard.close(linger_ms)
        self._context.term()

    def _bind(self, max_message_bytes: int, keys: str) -> None:
        for name, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, SEND_HWM),
            (zmq.RCVHWM, RECEIVE_HWM),
            (zmq.LINGER, LINGER_MS),
            (zmq.MAXMSGSIZE, max_message_bytes),
        ):
            self._socket.setsockopt(name, value)
        try:
            check_exposure(self._endpoint, keys)
            if keys:
                self._guard = secure_server(self._socket, self._context, Path(keys), SERVER_NAME)
                self._poller = zmq.Poller()
                for socket in (self._socket, *self._guard.sockets):
                    self._poller.register(socket, zmq.POLLIN)
            self._socket.bind(self._endpoint)
        except ConfigError:
            self._close(0)
            raise
        except zmq.ZMQError as error:
            self._close(0)
            raise QueueError(f"the queue listens at {self._endpoint}, which cannot be bound: {error}") from error

    def _drain(self) -> None:
        for _ in range(BURST):
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard_s = time.monotonic()
            holder = key_holder(frames[-1]) if self._guard is not None else None
            self.receive(frames[0].bytes, [frame.buffer for frame in frames[1:]], self._heard_s, holder)

    def receive(self, identity: bytes, frames: list[Any], now_s: float, holder: str | None = None) -> None:
        """One message: answered, put among those that wait, or refused and counted. ``holder``: of the key that it came under."""
        if self._violations.get(identity, 0) >= MAX_VIOLATIONS:
            self._service.refused["cut_off"] += 1
            return
        sequence = -1
        try:
            if not frames:
                raise SchemaError("a request has a header frame; met none")
            envelope = decode_envelope(frames[0])
            sequence = envelope.sequence
            self._check_envelope(envelope, holder)
            request = decode_request(frames[0])
            if isinstance(request.body, Hello):
                self._greet(envelope, identity, request.body, now_s)
                return
            session = self._sessions.of(envelope, identity)
            arrival = session.arrive(sequence)
        except AsyncRLError as error:
            self._reply(identity, [encode(Reply(sequence=sequence, body=self._refusal(error, identity)))])
            return
        if arrival is Arrival.REPEAT and session.kept(sequence):
            self._reply(identity, session.kept(sequence))
        elif arrival is not Arrival.WAITING:
            self._first_look(session, request, frames[1:], now_s)

    def _check_envelope(self, envelope: Envelope, holder: str | None) -> None:
        if envelope.protocol != PROTOCOL_VERSION:
            raise SchemaError(f"this queue speaks protocol {PROTOCOL_VERSION}; met {envelope.protocol}: upgrade the older side")
        if envelope.run_id != self._facts.run_id:
            raise QueueError(
                f"this queue serves run {self._facts.run_id}; met a request for run {envelope.run_id[:80]!r}: check the endpoint"
            )
        if not _NAME.fullmatch(envelope.sender):
            raise SchemaError(f"a sender's name has 1 to 128 letters, digits, '_', '.' or '-'; met {envelope.sender[:80]!r}")
        if holder is not None and holder != envelope.sender:
            raise QueueError(f"a sender has the name of its key; {envelope.sender} came under the key of {holder or 'nobody'}")

    def _greet(self, envelope: Envelope, identity: bytes, hello: Hello, now_s: float) -> None:
        session = self._sessions.greeted(envelope, identity)
        if session is not None and self._service.remembers(envelope.sender, hello.role):
            if session.greeted_again(envelope.sequence) is Arrival.NEW and hello.again:
                self._service.greet_again(session, hello, now_s)
            self._reply(identity, [encode(Reply(sequence=envelope.sequence, body=self._service.welcome()))])
            return
        welcome = self._service.greet(envelope.sender, hello, now_s)
        self._room.forget(envelope.sender)
        self._sessions.open(envelope, identity, hello)
        log.info("%s says hello as %s, incarnation %d", envelope.sender, hello.role.value, hello.incarnation)
        self._reply(identity, [encode(Reply(sequence=envelope.sequence, body=welcome))])

    def _first_look(self, session: Session, request: Request, payloads: Sequence[Any], now_s: float) -> None:
        wait_s, body = 0.0, request.body
        if isinstance(body, TicketRequest | LeaseRequest):
            wait_s = body.wait_s if 0.0 <= body.wait_s <= self._longest_wait_s else self._longest_wait_s
        waiting = Waiting(session=session, request=request, until_s=now_s + wait_s, deaths=self._service.deaths())
        if not self._look(waiting, payloads, now_s, Call.FIRST if wait_s > 0.0 else Call.ONLY):
            self._room.add(waiting)
        if isinstance(body, Heartbeat):
            self._spoke[session.sender] = None
        if isinstance(body, ProducerGone):
            self._room.forget(body.name)
            self._sessions.close(body.name)

    def _look(self, waiting: Waiting, payloads: Sequence[Any], now_s: float, call: Call) -> bool:
        """Whether the request got its answer now."""
        frames: Sequence[Any] = ()
        body: ReplyBody
        try:
            answer = self._service.answer(waiting.session, waiting.request.body, payloads, now_s, call)
            if answer is None:
                return False
            body, frames = answer
        except AsyncRLError as error:
            body = self._refusal(error, waiting.session.identity)
        reply = [encode(Reply(sequence=waiting.request.sequence, body=body)), *frames]
        granted = [(ticket.ticket, ticket.attempt) for ticket in body.tickets] if isinstance(body, Tickets) else []
        waiting.session.answer(waiting.request.sequence, reply, granted)
        self._reply(waiting.session.identity, reply)
        return True

    def _look_again(self, now_s: float) -> None:
        if not len(self._room):
            self._spoke.clear()
            return
        for waiting in self._room.over(now_s):
            self._again(waiting, now_s, Call.LAST)
        for waiting in self._room.leases():
            self._again(waiting, now_s, Call.LAST if self._service.deaths() > waiting.deaths else Call.AGAIN)
        epoch = self._service.gate.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._look_at_producers(now_s)
        else:
            for sender in self._spoke:
                for waiting in self._room.of(sender):
                    self._again(waiting, now_s, Call.AGAIN)
        self._spoke.clear()

    def _look_at_producers(self, now_s: float) -> None:
        shut_at = -1
        for waiting in self._room.tickets():
            version = self._service.version_of(waiting.session.sender, waiting.request.body)
            if version <= shut_at:
                continue
            if not self._again(waiting, now_s, Call.AGAIN) and self._service.monotone:
                shut_at = version

    def _again(self, waiting: Waiting, now_s: float, call: Call) -> bool:
        answered = self._look(waiting, (), now_s, call)
        if answered:
            self._room.remove(waiting)
        return answered

    def _refusal(self, error: AsyncRLError, identity: bytes) -> Refused:
        kind = type(error).__name__
        number = self._service.refused[kind] = self._service.refused[kind] + 1
        if isinstance(error, SchemaError | QueueError) and not isinstance(error, LostMessage):
            self._count_violation(identity, error)
        if worth_saying(number):
            log.warning("refused (%s, %d so far): %s", kind, number, error)
        return Refused(kind=kind, message=str(error))

    def _count_violation(self, identity: bytes, error: AsyncRLError) -> None:
        number = self._violations[identity] = self._violations.pop(identity, 0) + 1
        if number == MAX_VIOLATIONS:
            log.error("%s is cut off after %d refused messages: %s", identity.decode(errors="replace"), MAX_VIOLATIONS, error)
        while len(self._violations) > MAX_VIOLATORS:
            self._violations.popitem(last=False)

    def _reply(self, identity: bytes, frames: Sequence[Any]) -> None:
        self._outbox.append((identity, frames))

    def _send(self, identity: bytes, frames: Sequence[Any]) -> None:
        try:
            self._socket.send_multipart([identity, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # the peer is gone or does not read: its next repeat is answered from memory
            self._service.refused["unsent"] += 1
            log.warning("a reply to %s was not sent: %s", identity.decode(errors="replace"), error)

    def _say(self, now_s: float) -> None:
        if not len(self._room):
            self._said_s = now_s
        elif now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            names = self._room.senders()
            waiting = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            log.info("waiting: %s; %s", waiting, self._service.gate.status(now_s).blocked or "nothing is blocked")
