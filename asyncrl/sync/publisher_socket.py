"""The publisher's ROUTER: frames in, events for the state machine out, and back.

Mandatory: a receiver that is gone, or whose queue is full, is an error of that receiver and never a silent loss.
Frames from elsewhere (another run, another protocol, not a message at all) are counted and logged, and change nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import zmq

from asyncrl.errors import SyncError
from asyncrl.sync.machine import Order, Phase, SyncMachine
from asyncrl.sync.messages import (
    SYNC_PROTOCOL_VERSION,
    Abort,
    CommittedUpdate,
    CommitUpdate,
    FailedUpdate,
    Join,
    Prepare,
    Prepared,
    ToPublisher,
    ToReceiver,
    Transfer,
    UpdateManifest,
    Verified,
)

__all__ = ["Event", "PublisherSocket", "bound_socket"]

log = logging.getLogger(__name__)
HIGH_WATER_MARK = 256
MAX_MESSAGE_BYTES = 64 << 20
LINGER_MS = 500

Event = Callable[[SyncMachine, float], list[Order]]


class PublisherSocket:
    """Bound socket of the publisher; owned by its thread but for :meth:`queue` and :meth:`wake`.

    Raises:
        SyncError: the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, run_id: str) -> None:
        self._run_id = run_id
        self._context = zmq.Context()
        self._socket = bound_socket(self._context, endpoint)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._outbox: deque[tuple[str, int, ToReceiver]] = deque()
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToPublisher] = msgspec.msgpack.Decoder(ToPublisher)
        self.refused_frames = 0

    def queue(self, orders: Iterable[tuple[Order, UpdateManifest | None]]) -> None:
        """Puts orders into the outbox and wakes the thread; callable from any thread."""
        messages = [(order.name, order.update_id, _message(order, manifest)) for order, manifest in orders]
        with self._lock:
            self._outbox.extend(messages)
        if messages:
            self.wake()

    def wake(self) -> None:
        """Ends a running :meth:`receive` early."""
        try:
            self._wake_write.send(b"w")
        except OSError:  # full: the thread has been told already; closed: there is none left to tell
            return

    def receive(self, timeout_s: float) -> list[Event]:
        """Events of all frames that are there, after waiting up to ``timeout_s`` for the first."""
        self._poller.poll(math.ceil(timeout_s * 1000.0))
        with contextlib.suppress(BlockingIOError):  # nobody called wake()
            self._wake_read.recv(4096)
        events = []
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            event = self._event(identity, frames)
            if event is not None:
                events.append(event)
        return events

    def send_queued(self) -> list[tuple[str, int, str]]:
        """Empties the outbox; returns (receiver, update, reason) of each message that could not be sent."""
        with self._lock:
            messages, self._outbox = list(self._outbox), deque()
        unreachable = []
        for name, update_id, message in messages:
            try:
                self._socket.send_multipart([name.encode(), self._encoder.encode(message)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                unreachable.append((name, update_id, f"it cannot be reached: {error}"))
        return unreachable

    def close(self) -> None:
        """Closes everything; waits at most the linger time for what is queued."""
        self._socket.close()
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()

    def _event(self, identity: bytes, frames: list[bytes]) -> Event | None:
        try:
            (frame,) = frames
            message = self._decoder.decode(frame)
        except (ValueError, msgspec.MsgspecError) as error:
            self._refuse(identity, f"not one sync message: {error}")
            return None
        if message.name.encode() != identity:
            self._refuse(identity, f"it names itself {message.name!r}")
            return None
        if isinstance(message, Join) and (message.run_id, message.protocol) != (self._run_id, SYNC_PROTOCOL_VERSION):
            found, ours = (message.run_id, message.protocol), (self._run_id, SYNC_PROTOCOL_VERSION)
            self._refuse(identity, f"it joins run and protocol {found}; this is {ours}")
            return None
        return _event_of(message)

    def _refuse(self, identity: bytes, reason: str) -> None:
        self.refused_frames += 1
        log.warning("a frame of %r is refused: %s", identity[:64], reason)


def bound_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A ROUTER with every limit set, bound to ``endpoint``."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, LINGER_MS)
    router.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    router.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        router.close()
        context.term()
        raise SyncError(f"the publisher cannot bind {endpoint}: {error}; another run may hold it", endpoint=endpoint) from error
    return router


def _message(order: Order, manifest: UpdateManifest | None) -> ToReceiver:
    if order.phase is None:
        return Abort(update_id=order.update_id, reason=order.reason)
    if order.phase is Phase.PREPARE:
        assert manifest is not None, "an update is prepared before it is pruned"
        return Prepare(manifest=manifest)
    if order.phase is Phase.TRANSFER:
        return Transfer(update_id=order.update_id)
    return CommitUpdate(update_id=order.update_id)


def _event_of(message: ToPublisher) -> Event:
    name = message.name
    if isinstance(message, Join):
        log.info("receiver %s joins", name)
        return lambda machine, now_s: machine.join(name, now_s=now_s)
    update_id = message.update_id
    if isinstance(message, FailedUpdate):
        reason = f"{message.phase} failed: {message.reason}"
        return lambda machine, now_s: machine.failed(name, update_id, reason, now_s=now_s)
    if isinstance(message, CommittedUpdate):
        log.info("receiver %s serves version %d; it stood still for %.3f s", name, message.version, message.paused_s)
    phase = {Prepared: Phase.PREPARE, Verified: Phase.TRANSFER, CommittedUpdate: Phase.COMMIT}[type(message)]
    return lambda machine, now_s: machine.answered(name, update_id, phase, now_s=now_s)
