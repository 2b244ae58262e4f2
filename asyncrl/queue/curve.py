"""CURVE on a server's and a client's socket: who is let in, and how many were not.

    stranger → handshake → libzmq asks (ZAP) → Guard.answer → let in under the name of its key, or refused and counted
                  ↓ no key, another server's key, no ZeroMQ at all
               the socket's monitor tells → Guard.answer → counted

Consumes handshakes of one server socket and the folder of allowed keys; produces yes or no, and counts. It waits for
nothing: the loop that owns the socket polls ``Guard.sockets`` too and calls :meth:`Guard.answer`, in one thread. While
it does not, newcomers wait. Without a guard nobody is let in (``ZAP_ENFORCE_DOMAIN``).

Source: design note, section 4; RFC 23 (ZMTP), 26 (CURVE), 27 (ZAP) of zeromq.org.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from asyncrl.errors import ConfigError, QueueError
from asyncrl.queue.keys import public_keys, read_public, read_secret

__all__ = ["Guard", "HandshakeWatch", "key_holder", "secure_client", "secure_server"]

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"asyncrl"
HANDSHAKE_S = 5.0
BURST = 256
HWM = 1000
CLOSE_S = 2.0

_EVENT = struct.Struct("=h")
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ALL = _FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED


def secure_server(socket: zmq.Socket[Any], context: zmq.Context[Any], keys_dir: Path, name: str) -> Guard:
    """Gives a socket that is not bound yet the key ``name``; only holders of keys in ``keys_dir/allowed`` will get in.

    Raises:
        ConfigError: a key that is missing, malformed or readable by others; nobody is allowed.
        QueueError: the context has a guard already.
    """
    secret = read_secret(keys_dir, name)
    allowed = _Allowed(keys_dir / "allowed")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    return Guard(socket, context, allowed)


def secure_client(socket: zmq.Socket[Any], keys_dir: Path, name: str, server_name: str) -> None:
    """Gives a socket that is not connected yet the key ``name``; it will speak only with the holder of ``server_name``.

    Raises:
        ConfigError: a key that is missing, malformed or, if secret, readable by others.
    """
    secret = read_secret(keys_dir, name)
    socket.setsockopt(zmq.CURVE_SERVERKEY, read_public(keys_dir, server_name))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def key_holder(frame: zmq.Frame) -> str:
    """Name of the allowed key that a received frame came under; empty when its connection has none."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Guard:
    """Decides about newcomers of one server socket.

    Attributes:
        refused: ``unknown_key``: no file in the allow-list. ``handshake``: no key, the key of another server, another
            version of ZeroMQ. ``silence``: connections that said nothing of use within HANDSHAKE_S. A stranger that
            tries again counts again.
        sockets: poll these for input.
    """

    def __init__(self, socket: zmq.Socket[Any], context: zmq.Context[Any], allowed: _Allowed) -> None:
        self.refused: Counter[str] = Counter()
        self._allowed = allowed
        self._pending: deque[float] = deque()
        self._zap: zmq.Socket[Any] = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        try:
            self._zap.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self._zap.close()
            raise QueueError(f"one socket of a context is guarded; this context has a guard already ({error}): use another one") from error
        self._watch = HandshakeWatch(socket, context, _ALL)
        self.sockets = (self._zap, self._watch.socket)

    def answer(self, now_s: float) -> None:
        """Decides about all who wait; returns at once when nobody does."""
        for _ in range(BURST):
            try:
                request = self._zap.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            self._zap.send_multipart(self._decide(request))
        self._count(now_s)

    def close(self, linger_ms: int = 0) -> None:
        """Lets nobody in any more and closes the guarded socket, which sends what it has for up to ``linger_ms``."""
        self._zap.close(linger=0)
        self._watch.close(linger_ms)

    def _decide(self, request: list[bytes]) -> list[bytes]:
        if len(request) != 7 or request[0] != b"1.0" or request[5] != b"CURVE":
            number = request[1] if len(request) > 1 else b""
            return [b"1.0", number, b"500", b"a ZAP 1.0 request for CURVE is expected", b"", b""]
        name = self._allowed.name_of(request[6])
        if name is None:
            self.refused["unknown_key"] += 1
            address = request[3].decode(errors="replace")
            log.warning("refused a stranger from %s with key %s: not in %s", address, _text(request[6]), self._allowed.folder)
            return [b"1.0", request[1], b"400", b"the key is not allowed", b"", b""]
        return [b"1.0", request[1], b"200", b"OK", name.encode(), b""]

    def _count(self, now_s: float) -> None:
        for event in self._watch.events():
            if event == zmq.EVENT_ACCEPTED:
                self._pending.append(now_s)
                continue
            if event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self.refused["handshake"] += 1
            if self._pending:
                self._pending.popleft()
        # some garbage ends without an event: whatever is left after its time was no handshake (the oldest is taken for
        # each one that ended, so a newcomer in good standing is never counted)
        while self._pending and now_s - self._pending[0] > 2 * HANDSHAKE_S:
            self._pending.popleft()
            self.refused["silence"] += 1


class HandshakeWatch:
    """Events of a socket's handshakes, out of libzmq's monitor; closes the socket it watches.

    A client that got no answer asks :meth:`problem` whether it was refused. libzmq's own thread waits while the
    monitor's queue is full, so it is read regularly, and until its end.
    """

    def __init__(self, socket: zmq.Socket[Any], context: zmq.Context[Any], events: int = _FAILURES) -> None:
        self._watched = socket
        endpoint = f"inproc://asyncrl.handshakes.{socket.underlying:x}"
        socket.monitor(endpoint, events | zmq.EVENT_MONITOR_STOPPED)
        plain: zmq.Context[Any] = zmq.Context.shadow(context.underlying)
        self.socket: zmq.Socket[Any] = plain.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, HWM)
        self.socket.connect(endpoint)

    def events(self) -> list[int]:
        """Events since the last call, at most a burst of them."""
        seen: list[int] = []
        while len(seen) < BURST and self.socket.poll(0):
            event, _ = self.socket.recv_multipart(flags=zmq.NOBLOCK)
            seen.append(_EVENT.unpack_from(event)[0])
        return seen

    def problem(self) -> str:
        """Why the server let this client not in, in words and with the fix; empty if no handshake failed since the last call."""
        seen = set(self.events()) - {int(zmq.EVENT_MONITOR_STOPPED)}
        if zmq.EVENT_HANDSHAKE_FAILED_AUTH in seen:
            return "it does not allow this client's key: copy the public key into the folder 'allowed' of the server's keys"
        if seen:
            return "the handshake failed: is the server's public key the right one, and do both sides use keys?"
        return ""

    def close(self, linger_ms: int = 0) -> None:
        """Closes the watched socket, then the monitor."""
        self._watched.close(linger=linger_ms)
        deadline_s = time.monotonic() + linger_ms / 1000 + CLOSE_S
        while zmq.EVENT_MONITOR_STOPPED not in self.events() and time.monotonic() < deadline_s:
            self.socket.poll(10)
        self.socket.close(linger=0)


class _Allowed:
    """The allow-list, read again when its folder changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names, problems = public_keys(folder)
        self._changed_ns = folder.stat().st_mtime_ns
        if problems:
            raise ConfigError(problems[0])
        if not self._names:
            raise ConfigError(f"a server lets in the keys in {folder}; met none: `asyncrl keys {folder.parent} NAME…` makes them")

    def name_of(self, key: bytes) -> str | None:
        """Name of the holder of a raw public key (32 bytes); None for a stranger."""
        self._refresh()
        return self._names.get(_text(key).encode())

    def _refresh(self) -> None:
        try:
            changed_ns = self.folder.stat().st_mtime_ns
            if changed_ns == self._changed_ns:
                return
            self._names, problems = public_keys(self.folder)
            self._changed_ns = changed_ns
        except (ConfigError, OSError) as error:
            # a list that cannot be read lets nobody in until it can be
            log.warning("nobody new is let in: %s", error)
            self._names, self._changed_ns = {}, -1
            return
        for problem in problems:
            log.warning("a key is left out: %s", problem)


def _text(key: bytes) -> str:
    return str(z85.encode(key).decode()) if len(key) == 32 else "of another length"
