"""A consumer's way to payload that stayed with its producer; see :mod:`asyncrl.queue.direct`.

Consumes names and addresses out of the broker's answers, produces frames; waits for a producer up to ``queue.dead_after_s``, and for
one that let it wait in vain not again within the same answer of the broker.

Source: design note, section 4.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import zmq

from asyncrl.errors import ConfigError, QueueError, SchemaError
from asyncrl.queue.contexts import end_context, hold_context
from asyncrl.queue.curve import secure_client
from asyncrl.queue.messages import PROTOCOL_VERSION, PayloadItem, Pull, Pulled

__all__ = ["Puller"]

MAX_SOURCES = 256
FULL_PAUSE_MS = 20
_pulled = msgspec.msgpack.Decoder(Pulled)


class Puller:
    """Connections to the producers of one run, the most recently used ones.

    Args:
        name: of the consumer, and of its key. keys: folder of CURVE keys, with the public ones of producers; empty: none.
        answer_s: how long a producer is waited for. max_frame_bytes: beyond it a frame is not taken.
    """

    def __init__(self, run_id: str, name: str, answer_s: float, max_frame_bytes: int, *, keys: str = "") -> None:
        self._run_id, self._name, self._keys = run_id, name, keys
        self._answer_s, self._max_frame_bytes = answer_s, max_frame_bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = hold_context(zmq.Context())
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()
        self._silent: set[str] = set()

    def begin(self) -> None:
        """Another answer of the broker is read: whoever did not answer before is asked again."""
        self._silent.clear()

    def pull(self, item: PayloadItem) -> list[Any]:
        """Frames of a payload; their checksum is not looked at.

        Raises:
            QueueError: the producer does not answer, or keeps no such payload. SchemaError: it has another length.
            ConfigError: keys that cannot be used.
        """
        if item.source in self._silent:
            raise QueueError(f"{item.source}, which keeps payload {item.segment}, has just not answered")
        answer = self._ask(item)
        if answer is None:
            self._silent.add(item.source)
            self._drop(item.source)
            raise QueueError(f"{item.source}, which keeps payload {item.segment}, did not answer within {self._answer_s:g} s: it is gone")
        found, frames = answer
        if not found:
            raise QueueError(f"{item.source} keeps no payload {item.segment}: it was started anew")
        if sum(map(len, frames)) != sum(item.lengths):
            raise SchemaError(f"payload {item.segment} has {sum(item.lengths)} bytes; met {sum(map(len, frames))}")
        return frames

    def close(self) -> None:
        """Closes all connections."""
        for source in list(self._sockets):
            self._drop(source)
        end_context(self._context)

    def _ask(self, item: PayloadItem) -> tuple[bool, list[Any]] | None:
        socket = self._socket(item)
        request = msgspec.msgpack.encode(Pull(protocol=PROTOCOL_VERSION, run_id=self._run_id, segment=item.segment))
        deadline_s, asked = time.monotonic() + self._answer_s, False
        while (left_s := deadline_s - time.monotonic()) > 0.0:
            asked = asked or self._send(socket, request)  # once: a payload that was asked for twice comes twice
            if not socket.poll(max(1, int(left_s * 1000)) if asked else FULL_PAUSE_MS):
                continue
            head, *frames = socket.recv_multipart(copy=False)
            answer = _decoded(head.buffer)
            if answer is not None and answer.segment == item.segment:
                return answer.found, [frame.buffer for frame in frames]
        return None

    def _send(self, socket: zmq.Socket[bytes], request: bytes) -> bool:
        try:
            socket.send(request, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _socket(self, item: PayloadItem) -> zmq.Socket[bytes]:
        known = self._sockets.get(item.source)
        if known is not None:
            self._sockets.move_to_end(item.source)
            return known
        if len(self._sockets) >= MAX_SOURCES:
            self._drop(next(iter(self._sockets)))
        socket = self._context.socket(zmq.DEALER)
        try:
            self._set(socket, item)
            socket.connect(item.source)
        except ConfigError:  # no group can be had until that is mended
            socket.close(linger=0)
            raise
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise QueueError(f"payload {item.segment} is kept at {item.source}, which cannot be asked: {error}") from error
        self._sockets[item.source] = socket
        return socket

    def _set(self, socket: zmq.Socket[bytes], item: PayloadItem) -> None:
        for name, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 4), (zmq.RCVHWM, 4), (zmq.MAXMSGSIZE, self._max_frame_bytes)):
            socket.setsockopt(name, value)
        socket.setsockopt(zmq.IPV6, int("[" in item.source))
        if self._keys:
            secure_client(socket, Path(self._keys), self._name, item.segment.rsplit(".", 2)[1])

    def _drop(self, source: str) -> None:
        socket = self._sockets.pop(source, None)
        if socket is not None:
            socket.close(linger=0)


def _decoded(frame: Any) -> Pulled | None:
    try:
        return _pulled.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
