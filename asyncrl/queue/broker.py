"""The broker's socket and its one loop.

    socket → check protocol, run, session, number → service → reply, or wait
       ↑ every message and every TICK_S: requests that wait are looked at again, time passes in the gate

Consumes requests of producers, consumer and observers; produces replies. It waits for messages alone: producers and
learner unblock each other through the gate, and a broker to whom nobody speaks any more ends by itself.

Source: design note, sections 3 and 4; fault B56.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from asyncrl.config import Config
from asyncrl.config.run_dir import RunFacts
from asyncrl.errors import AsyncRLError, QueueError, SchemaError
from asyncrl.queue.messages import (
    PROTOCOL_VERSION,
    Hello,
    LeaseRequest,
    ProducerGone,
    Refused,
    Reply,
    ReplyBody,
    Request,
    TicketRequest,
)
from asyncrl.queue.service import Call, QueueService
from asyncrl.queue.sessions import Arrival, Session, Sessions
from asyncrl.queue.wire import Envelope, decode_envelope, decode_request, encode

__all__ = ["Broker"]

log = logging.getLogger(__name__)

TICK_S = 0.1
BURST = 64
HWM = 1000
LINGER_MS = 1000
MAX_NAME = 128
SAY_EVERY_S = 10.0


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A request without an answer yet; ``deaths`` counts producers that had died when it came."""

    session: Session
    request: Request
    until_s: float
    deaths: int


class Broker:
    """One ROUTER socket; binds at construction.

    Args:
        service: answers requests.

    Raises:
        QueueError: the endpoint cannot be bound.
    """

    def __init__(self, config: Config, facts: RunFacts, service: QueueService) -> None:
        self._facts = facts
        self._service = service
        self._sessions = Sessions()
        self._waiting: list[_Waiting] = []
        self._longest_wait_s = config.queue.dead_after_s
        self._silence_s = config.generator.start_timeout_s + config.queue.dead_after_s
        self._heard_s = self._said_s = time.monotonic()
        self.ending = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._bind(config.queue.max_message_mib << 20)

    def run(self) -> int:
        """Serves until it is told to end. Returns 0, or 1 when nobody spoke to it for too long."""
        try:
            while not (self.ending or self._service.exiting):
                if self._socket.poll(int(TICK_S * 1000)):
                    self._drain()
                now_s = time.monotonic()
                for line in self._service.expire(now_s):
                    log.warning(line)
                self._look_again(now_s)
                self._say(now_s)
                if now_s - self._heard_s > self._silence_s:
                    log.error("nobody has spoken to the queue at %s for %.0f s: it ends", self._facts.queue_endpoint, self._silence_s)
                    return 1
        finally:
            self._socket.close(linger=LINGER_MS)
            self._context.term()
        return 0

    def _bind(self, max_message_bytes: int) -> None:
        for name, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, HWM),
            (zmq.RCVHWM, HWM),
            (zmq.LINGER, LINGER_MS),
            (zmq.MAXMSGSIZE, max_message_bytes),
        ):
            self._socket.setsockopt(name, value)
        try:
            self._socket.bind(self._facts.queue_endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            self._context.term()
            raise QueueError(f"the queue listens at {self._facts.queue_endpoint}, which cannot be bound: {error}") from error

    def _drain(self) -> None:
        for _ in range(BURST):
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard_s = time.monotonic()
            self._receive(frames[0].bytes, [frame.buffer for frame in frames[1:]], self._heard_s)

    def _receive(self, identity: bytes, frames: list[Any], now_s: float) -> None:
        sequence = -1
        try:
            if not frames:
                raise SchemaError("a request has a header frame; met none")
            envelope = decode_envelope(frames[0])
            sequence = envelope.sequence
            self._check_envelope(envelope)
            request = decode_request(frames[0])
            if isinstance(request.body, Hello):
                self._greet(envelope, identity, request.body, now_s)
                return
            session = self._sessions.of(envelope, identity)
            arrival = session.arrive(sequence)
        except AsyncRLError as error:
            self._send(identity, [encode(Reply(sequence=sequence, body=self._refusal(error)))])
            return
        if arrival is Arrival.REPEAT and session.kept(sequence):
            self._send(identity, session.kept(sequence))
        elif arrival is not Arrival.WAITING:
            self._first_look(session, request, frames[1:], now_s)

    def _check_envelope(self, envelope: Envelope) -> None:
        if envelope.protocol != PROTOCOL_VERSION:
            raise SchemaError(f"this queue speaks protocol {PROTOCOL_VERSION}; met {envelope.protocol}: upgrade the older side")
        if envelope.run_id != self._facts.run_id:
            raise QueueError(
                f"this queue serves run {self._facts.run_id}; met a request for run {envelope.run_id[:MAX_NAME]}: check the endpoint"
            )
        if not 1 <= len(envelope.sender) <= MAX_NAME:
            raise SchemaError(f"a sender's name has 1 to {MAX_NAME} characters; met {len(envelope.sender)}")

    def _greet(self, envelope: Envelope, identity: bytes, hello: Hello, now_s: float) -> None:
        if envelope.sequence != 0:
            raise SchemaError(f"a hello has number 0; met {envelope.sequence}")
        if self._sessions.greeted(envelope, identity):
            self._send(identity, [encode(Reply(sequence=0, body=self._service.welcome()))])
            return
        welcome = self._service.greet(envelope.sender, hello, now_s)
        self._forget(envelope.sender)
        self._sessions.open(envelope, identity, hello)
        log.info("%s says hello as %s, incarnation %d", envelope.sender, hello.role.value, hello.incarnation)
        self._send(identity, [encode(Reply(sequence=0, body=welcome))])

    def _first_look(self, session: Session, request: Request, payloads: Sequence[Any], now_s: float) -> None:
        wait_s = 0.0
        if isinstance(request.body, TicketRequest | LeaseRequest):
            wait_s = request.body.wait_s if 0.0 <= request.body.wait_s <= self._longest_wait_s else self._longest_wait_s
        waiting = _Waiting(session=session, request=request, until_s=now_s + wait_s, deaths=self._service.deaths())
        if not self._look(waiting, payloads, now_s, Call.FIRST if wait_s > 0.0 else Call.ONLY):
            self._waiting.append(waiting)
        if isinstance(request.body, ProducerGone):
            self._forget(request.body.name)
            self._sessions.close(request.body.name)

    def _look(self, waiting: _Waiting, payloads: Sequence[Any], now_s: float, call: Call) -> bool:
        """Whether the request got its answer now."""
        frames: Sequence[Any] = ()
        body: ReplyBody
        try:
            answer = self._service.answer(waiting.session, waiting.request.body, payloads, now_s, call)
            if answer is None:
                return False
            body, frames = answer
        except AsyncRLError as error:
            body = self._refusal(error)
        reply = [encode(Reply(sequence=waiting.request.sequence, body=body)), *frames]
        waiting.session.answer(waiting.request.sequence, reply)
        self._send(waiting.session.identity, reply)
        return True

    def _look_again(self, now_s: float) -> None:
        left = []
        for waiting in self._waiting:
            died = isinstance(waiting.request.body, LeaseRequest) and self._service.deaths() > waiting.deaths
            call = Call.LAST if died or now_s >= waiting.until_s else Call.AGAIN
            if not self._look(waiting, (), now_s, call):
                left.append(waiting)
        self._waiting = left

    def _refusal(self, error: AsyncRLError) -> Refused:
        kind = type(error).__name__
        self._service.refused[kind] += 1
        log.warning("refused (%s): %s", kind, error)
        return Refused(kind=kind, message=str(error))

    def _send(self, identity: bytes, frames: Sequence[Any]) -> None:
        try:
            self._socket.send_multipart([identity, *frames], flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # the peer is gone or does not read: its next repeat is answered from memory
            self._service.refused["unsent"] += 1
            log.warning("a reply to %s was not sent: %s", identity.decode(errors="replace"), error)

    def _forget(self, sender: str) -> None:
        self._waiting = [waiting for waiting in self._waiting if waiting.session.sender != sender]

    def _say(self, now_s: float) -> None:
        if not self._waiting:
            self._said_s = now_s
        elif now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            names = ", ".join(sorted({waiting.session.sender for waiting in self._waiting}))
            log.info("waiting: %s; %s", names, self._service.gate.status().blocked or "nothing is blocked")
