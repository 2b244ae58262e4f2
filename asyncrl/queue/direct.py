"""Payload that stays with its producer: kept until its group is settled, handed out to the rank that trains it.

    consumer ── Pull(name) ──▶ thread of the shelf ── Pulled, frames ──▶ consumer

Only name, length and checksum pass the broker. Consumes frames and requests, produces frames; its one thread waits for requests, the
producer for nothing. Payload dies with its producer: the broker has its groups sampled again.

Source: design note, section 4.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import socket as sockets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from asyncrl.config.network import check_exposure
from asyncrl.errors import QueueError
from asyncrl.queue.contexts import end_context, hold_context
from asyncrl.queue.curve import Guard, secure_server
from asyncrl.queue.messages import PROTOCOL_VERSION, Pull, Pulled
from asyncrl.queue.payload import checksum
from asyncrl.queue.shm import Segment, check_owner
from asyncrl.queue.wire import worth_saying

__all__ = ["Shelf"]

log = logging.getLogger(__name__)
POLL_MS = 200
MAX_REQUEST_BYTES = 4096
HWM = 64
FRAME_BYTES = 16 << 20
"""Longer frames are cut: a receiver's allocator keeps pages of blocks up to 32 MiB."""

_pull = msgspec.msgpack.Decoder(Pull)


class Shelf:
    """Payload of one producer; it has the methods of :class:`asyncrl.queue.arena.Arena`.

    Args:
        run_id, owner: parts of every name.
        broker: address of a broker of the run; the shelf listens beside it, or at the address from which this machine reaches it.
        limit_bytes: kept together. max_frame_bytes: what consumers take.
        keys: folder of CURVE keys with that of ``owner``; empty: none.

    Attributes:
        source: the address at which it hands out.
        refused: requests that were none, by reason; the log tells of them.

    Raises:
        QueueError: the address cannot be bound. ConfigError: it can be reached from elsewhere and there are no keys, or bad ones.
    """

    def __init__(
        self, run_id: str, owner: str, broker: str, limit_bytes: int, *, max_frame_bytes: int = FRAME_BYTES, keys: str = ""
    ) -> None:
        check_owner(run_id, owner)
        self._frame_bytes = min(FRAME_BYTES, max_frame_bytes)
        self._run_id = run_id
        self._prefix = f"asyncrl-{run_id}.q.{owner}."
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.refused: Counter[str] = Counter()
        self._numbers = itertools.count(time.time_ns())  # no name of an earlier life comes again: those may still be released
        self._kept: dict[str, list[Any]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = hold_context(zmq.Context())
        self._socket = self._context.socket(zmq.ROUTER)
        self._guard: Guard | None = None
        self.source = self._bind(_beside(broker), owner, keys)
        self._thread = threading.Thread(target=self._serve, name=f"payload of {owner}", daemon=True)
        self._thread.start()

    @property
    def num_used(self) -> int:
        """Groups that aren't settled."""
        return len(self._kept)

    def write(self, frames: Sequence[Any]) -> Segment:
        """Keeps frames, without a copy: they must not change until their group is settled.

        Raises:
            QueueError: the shelf is full.
        """
        pieces = [piece for frame in frames for piece in _cut(memoryview(frame).cast("B"), self._frame_bytes)]
        length = sum(piece.nbytes for piece in pieces)
        name = f"{self._prefix}{next(self._numbers)}"
        with self._lock:
            if self.num_bytes + length > self.limit_bytes:
                raise QueueError(
                    f"payload kept at this producer is limited to {self.limit_bytes} bytes; {self.num_bytes} are in {self.num_used} groups "
                    f"that aren't settled and {length} are wanted: wait for a commit, or raise queue.max_queued_mib",
                    num_bytes=length,
                )
            self._kept[name] = pieces
            self.num_bytes += length
        return Segment(name, length, checksum(pieces))

    def recycle(self, names: Iterable[str]) -> None:
        """The groups under these names are settled."""
        with self._lock:
            for name in names:
                self.num_bytes -= sum(piece.nbytes for piece in self._kept.pop(name, ()))

    def close(self, unlink: bool) -> None:
        """Hands out no more; what was kept is gone, whatever ``unlink``."""
        self._closing.set()
        self._thread.join()
        self._kept.clear()

    def _bind(self, address: str, owner: str, keys: str) -> str:
        for name, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, HWM),
            (zmq.RCVHWM, HWM),
            (zmq.MAXMSGSIZE, MAX_REQUEST_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(name, value)
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            check_exposure(address, keys)
            if keys:
                self._guard = secure_server(self._socket, self._context, Path(keys), owner)
            try:
                self._socket.bind(address)
            except zmq.ZMQError as error:
                raise QueueError(f"a producer hands out its payload at {address}, which cannot be bound: {error}") from error
            undo.pop_all()
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _serve(self) -> None:
        poller = zmq.Poller()
        for one in (self._socket, *(self._guard.sockets if self._guard is not None else ())):
            poller.register(one, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._guard is not None:
                self._guard.answer(time.monotonic())
            if self._socket in ready:
                self._answer(*self._socket.recv_multipart())
        self._end()

    def _answer(self, identity: bytes, *frames: bytes) -> None:
        try:
            request = _pull.decode(frames[0] if frames else b"")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._refuse("not a request")
            return
        if (request.protocol, request.run_id) != (PROTOCOL_VERSION, self._run_id):
            self._refuse("another run or protocol")
            return
        with self._lock:
            pieces = list(self._kept.get(request.segment, ()))
        head = msgspec.msgpack.encode(Pulled(segment=request.segment, found=bool(pieces)))
        try:
            self._socket.send_multipart([identity, head, *pieces], flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # it went away, or does not read: it asks again if it still wants it
            log.debug("a consumer took no answer: %s", error)

    def _refuse(self, reason: str) -> None:
        number = self.refused[reason] = self.refused[reason] + 1
        if worth_saying(number):
            log.warning("refused at %s (%s, %d so far)", self.source, reason, number)

    def _end(self) -> None:
        if self._guard is None:
            self._socket.close(linger=0)
        else:
            self._guard.close()
        end_context(self._context)


def _cut(frame: memoryview, longest: int) -> list[memoryview]:
    return [frame[start : start + longest] for start in range(0, frame.nbytes, longest)]


def _beside(broker: str) -> str:
    """Where a shelf listens, given the broker's address."""
    if broker.startswith("ipc://"):
        return f"{broker}.{secrets.token_hex(4)}"
    host, _, port = broker.removeprefix("tcp://").rpartition(":")
    try:
        family, _, _, _, where = sockets.getaddrinfo(host.strip("[]"), int(port), type=sockets.SOCK_DGRAM)[0]
        with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing: the kernel chooses the address that reaches the broker
            own = probe.getsockname()[0]
    except OSError as error:
        raise QueueError(f"a producer listens at the address from which it reaches {broker}; there is none: {error}") from error
    return f"tcp://[{own}]:*" if ":" in own else f"tcp://{own}:*"
