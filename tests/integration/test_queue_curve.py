"""CURVE over real sockets: known keys pass, everyone else is refused and counted."""

from __future__ import annotations

import asyncio
import contextlib
import socket as plain
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import zmq
import zmq.asyncio

from asyncrl.errors import ConfigError, QueueError
from asyncrl.queue import curve
from asyncrl.queue.curve import Guard, HandshakeWatch, key_holder, secure_client, secure_server
from asyncrl.queue.keys import make_keys


class Server:
    """A guarded ROUTER and the one loop that serves it."""

    def __init__(self, keys: Path, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.guard: Guard = secure_server(self.socket, self.context, keys, "queue")
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.got: list[tuple[str, bytes]] = []

    def serve(self, until: Callable[[], bool], timeout_s: float = 3.0, late_s: float = 0.0) -> bool:
        poller = zmq.Poller()
        for each in (self.socket, *self.guard.sockets):
            poller.register(each, zmq.POLLIN)
        deadline_s = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline_s:
                return False
            poller.poll(20)
            self.guard.answer(time.monotonic() + late_s)
            while self.socket.poll(0):
                frames = self.socket.recv_multipart(copy=False)
                self.got.append((key_holder(frames[-1]), frames[-1].bytes))
                self.socket.send_multipart([frames[0].bytes, b"answer"])
        return True

    def close(self) -> None:
        self.guard.close()
        self.context.term()


class Client:
    made: ClassVar[list[Client]] = []

    def __init__(self, endpoint: str, keys: Path | None, name: str = "", server_name: str = "queue") -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        if keys is not None:
            secure_client(self.socket, keys, name, server_name)
        self.watch = HandshakeWatch(self.socket, self.context)
        self.socket.connect(endpoint)
        self.socket.send(f"from {name}".encode())
        self.made.append(self)

    def close(self) -> None:
        self.watch.close()
        self.context.term()


@pytest.fixture(autouse=True)
def clients_end() -> Iterator[None]:
    """A context left open would hang the interpreter's end."""
    yield
    while Client.made:
        Client.made.pop().close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["queue", "generator-0", "learner-0"])
    return tmp_path / "keys"


@pytest.fixture
def server(keys: Path) -> Iterator[Server]:
    server = Server(keys)
    yield server
    server.close()


def refused_by(server: Server, client: Client, kind: str, number: int = 1) -> str:
    """Serves until the stranger was counted; what the client says of it."""
    assert server.serve(lambda: server.guard.refused[kind] >= number), dict(server.guard.refused)
    said: list[str] = []
    assert server.serve(lambda: bool(said.append(client.watch.problem()) or said[-1]))
    return said[-1]


def test_known_keys_pass_and_their_frames_carry_the_name_of_the_key(server: Server, keys: Path) -> None:
    clients = [Client(server.endpoint, keys, name) for name in ("generator-0", "learner-0")]
    assert server.serve(lambda: len(server.got) == 2)
    assert sorted(server.got) == [("generator-0", b"from generator-0"), ("learner-0", b"from learner-0")]
    for client in clients:
        assert client.socket.poll(3000) and client.socket.recv() == b"answer" and client.watch.problem() == ""
    assert server.serve(lambda: False, timeout_s=0.2, late_s=60.0) is False
    assert not server.guard.refused


def test_a_stranger_with_a_key_of_its_own_is_refused_and_counted(server: Server, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "own", ["generator-0"])
    (tmp_path / "own" / "queue.public").write_bytes((keys / "queue.public").read_bytes())
    said = refused_by(server, Client(server.endpoint, tmp_path / "own", "generator-0"), "unknown_key")
    assert "does not allow this client's key: copy the public key into the folder 'allowed'" in said
    assert server.got == [] and server.guard.refused["unknown_key"] == 1


def test_a_stranger_without_a_key_is_refused_and_counted(server: Server) -> None:
    said = refused_by(server, Client(server.endpoint, None), "handshake")
    assert "do both sides use keys?" in said and server.got == []


def test_a_client_that_takes_another_key_for_the_servers_does_not_speak(server: Server, keys: Path) -> None:
    said = refused_by(server, Client(server.endpoint, keys, "generator-0", server_name="learner-0"), "handshake")
    assert "is the server's public key the right one" in said and server.got == []


def test_connections_that_are_no_zeromq_are_counted_and_hurt_nobody(server: Server, keys: Path) -> None:
    port = int(server.endpoint.rpartition(":")[2])
    probes = []
    for data in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\x01\x00" * 40, bytes(64)):
        probes.append(plain.create_connection(("127.0.0.1", port)))
        probes[-1].sendall(data)
    Client(server.endpoint, keys, "generator-0")
    assert server.serve(lambda: len(server.got) == 1)
    for probe in probes:
        probe.close()
    assert server.serve(lambda: server.guard.refused.total() >= 4, late_s=60.0), dict(server.guard.refused)
    assert server.guard.refused.total() == 4 and server.guard.refused["unknown_key"] == 0


def test_a_key_allowed_while_the_server_runs_gets_in_and_one_taken_away_does_not(server: Server, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "own", ["late"])
    (tmp_path / "own" / "queue.public").write_bytes((keys / "queue.public").read_bytes())
    refused_by(server, Client(server.endpoint, tmp_path / "own", "late"), "unknown_key")
    time.sleep(0.02)
    (keys / "allowed" / "late.public").write_bytes((tmp_path / "own" / "late.public").read_bytes())
    Client(server.endpoint, tmp_path / "own", "late")
    assert server.serve(lambda: server.got == [("late", b"from late")])
    time.sleep(0.02)
    (keys / "allowed" / "late.public").unlink()
    refused_by(server, Client(server.endpoint, tmp_path / "own", "late"), "unknown_key", 2)
    assert len(server.got) == 1


def test_a_list_that_can_no_longer_be_read_lets_nobody_in(server: Server, keys: Path) -> None:
    time.sleep(0.02)
    (keys / "allowed").rename(keys / "elsewhere")
    refused_by(server, Client(server.endpoint, keys, "generator-0"), "unknown_key")
    assert server.got == []


def test_without_its_guard_a_server_lets_nobody_in(server: Server, keys: Path) -> None:
    server.guard.sockets[0].close()
    client = Client(server.endpoint, keys, "generator-0")
    assert not server.socket.poll(300) and not client.socket.poll(0)


def test_a_server_starts_with_a_sound_list_and_a_closed_secret_or_not_at_all(keys: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    (keys / "queue.secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"queue\.secret has mode 644: chmod 600"):
        secure_server(socket, context, keys, "queue")
    with pytest.raises(ConfigError, match=r"queue\.secret has mode 644: chmod 600"):
        secure_client(socket, keys, "queue", "queue")
    (keys / "queue.secret").chmod(0o600)
    (keys / "allowed" / "odd.public").write_text("no key")
    with pytest.raises(ConfigError, match=r"odd\.public holds one key"):
        secure_server(socket, context, keys, "queue")
    for file in (keys / "allowed").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"lets in the keys in .*allowed; met none: `asyncrl keys"):
        secure_server(socket, context, keys, "queue")
    socket.close()
    context.term()


def test_a_context_has_one_guard(server: Server, keys: Path) -> None:
    second = server.context.socket(zmq.ROUTER)
    with pytest.raises(QueueError, match="this context has a guard already"):
        secure_server(second, server.context, keys, "queue")
    second.close()


def test_an_asyncio_client_passes_and_learns_why_it_does_not(server: Server, keys: Path, tmp_path: Path) -> None:
    async def scene(folder: Path, answered: bool) -> str:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        secure_client(socket, folder, "generator-0", "queue")
        watch = HandshakeWatch(socket, context)
        socket.connect(server.endpoint)
        await socket.send(b"hello")
        receive = asyncio.ensure_future(socket.recv())
        said = ""
        for _ in range(100):
            server.serve(lambda: False, timeout_s=0.01)
            await asyncio.sleep(0.005)
            said = watch.problem()
            if receive.done() or said:
                break
        assert receive.done() is answered
        receive.cancel()
        watch.close()
        context.term()
        return said

    make_keys(tmp_path / "own", ["generator-0"])
    (tmp_path / "own" / "queue.public").write_bytes((keys / "queue.public").read_bytes())
    assert asyncio.run(scene(keys, True)) == ""
    assert "does not allow this client's key" in asyncio.run(scene(tmp_path / "own", False))


@pytest.fixture
def flooded(keys: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server whose monitor is full: libzmq queues 1,000 events beyond HWM, 700 connections make 1,400, nobody reads."""
    monkeypatch.setattr(curve, "HWM", 1)
    server = Server(keys)
    probes = []
    for _ in range(700):
        probes.append(plain.socket())
        probes[-1].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            probes[-1].connect(("127.0.0.1", int(server.endpoint.rpartition(":")[2])))
        if len(probes) % 50 == 0:
            time.sleep(0.01)  # the listener's backlog is 100
    for probe in probes:
        probe.close()
    time.sleep(0.2)
    return server


def test_a_flood_that_filled_the_monitor_keeps_no_known_client_out(flooded: Server, keys: Path) -> None:
    Client(flooded.endpoint, keys, "generator-0")
    assert flooded.serve(lambda: len(flooded.got) == 1, timeout_s=10.0)
    assert flooded.serve(lambda: flooded.guard.refused["handshake"] > 500, timeout_s=10.0), flooded.guard.refused
    flooded.close()


def test_a_server_closes_at_once_with_its_monitor_full(flooded: Server) -> None:
    ender = threading.Thread(target=flooded.close, daemon=True)
    ender.start()
    ender.join(timeout=10.0)
    assert not ender.is_alive()
