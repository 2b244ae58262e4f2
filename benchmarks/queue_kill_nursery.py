"""Bears the processes that the kill test kills: everything is imported once, and each life is a fork of a few milliseconds.

Consumes one JSON line a birth on stdin ({"role", "arguments", "log", "kill_at"}); produces one a birth ({"born"}) and one a death
({"died", "status"}) on stdout. It waits for either; the end of stdin ends it and all its children.

``ASYNCRL_TEST_KILL_AT=KIND:NUMBER`` in a child's environment is read here alone: the process kills itself with SIGKILL at the call of
that number. Kinds: ``write`` before a write to the log, ``torn`` after half of it, ``statement`` before a statement of the ledger,
``send`` before a message is sent, ``sent`` after it, ``point`` at a named point of the consumer's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import sqlite3
import sys
import traceback
from pathlib import Path
from typing import Any

import zmq

import asyncrl.queue.opening
from asyncrl.queue.__main__ import main as serve
from benchmarks import queue_kill_roles as roles

__all__ = ["KILL_AT", "Fuse", "main"]

KILL_AT = "ASYNCRL_TEST_KILL_AT"
SEGMENT_BYTES = 256 << 10
POLL_S = 0.01


class Fuse:
    """Kills this process at the call of the number that the environment names."""

    def __init__(self, setting: str) -> None:
        self.kind, _, number = setting.partition(":")
        self.left = int(number or -1)

    def burn(self, kind: str) -> None:
        """One call of a kind."""
        if kind == self.kind and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Puts itself before writes of the log, statements of the ledger and messages."""
        pwritev, connect, send = os.pwritev, sqlite3.connect, zmq.Socket.send_multipart

        def write(fd: int, buffers: list[memoryview], position: int) -> int:
            self.burn("write")
            if self.kind == "torn" and self.left == 0:
                pwritev(fd, [buffers[0], *(buffer[: buffer.nbytes // 2] for buffer in buffers[1:])], position)
            self.burn("torn")
            return pwritev(fd, buffers, position)

        def opened(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **options)
            connection.set_trace_callback(lambda statement: self.burn("statement"))
            return connection

        def sent(socket: Any, *arguments: Any, **options: Any) -> Any:
            self.burn("send")
            answer = send(socket, *arguments, **options)
            self.burn("sent")
            return answer

        os.pwritev = write
        sqlite3.connect = opened
        zmq.Socket.send_multipart = sent


def main() -> int:
    """Serves one driver until it closes stdin."""
    children: set[int] = set()
    os.set_blocking(0, False)
    waiting = b""
    try:
        while True:
            select.select([0], [], [], POLL_S)
            with contextlib.suppress(BlockingIOError):
                read = os.read(0, 1 << 16)
                if not read:
                    return 0
                waiting += read
            *lines, waiting = waiting.split(b"\n")
            for line in lines:
                children.add(pid := _born(json.loads(line)))
                _say(born=pid)
            _bury(children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _bury(children: set[int]) -> None:
    for child in list(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.discard(pid)
            _say(died=pid, status=os.waitstatus_to_exitcode(status))


def _say(**facts: int) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


def _born(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ[KILL_AT] = order["kill_at"]
        code = _live(order["role"], order["arguments"])
    except BaseException:  # noqa: BLE001 - a forked child must not go on in its parent's loop, whatever was raised: it ends, and says why
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _live(role: str, arguments: list[Any]) -> int:
    fuse = Fuse(os.environ[KILL_AT])
    match role:
        case "broker":
            asyncrl.queue.opening.SEGMENT_BYTES = SEGMENT_BYTES  # so that files of the log are begun and dropped all the time
            fuse.install()
            return serve([str(arguments[0])])
        case "producer":
            asyncio.run(roles.produce(Path(arguments[0]), arguments[1], arguments[2]))
        case "consumer":
            roles.consume(Path(arguments[0]), arguments[1], lambda point: fuse.burn("point"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
