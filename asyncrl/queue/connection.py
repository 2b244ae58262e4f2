"""What the queue's clients share: socket settings, deadlines, and the blocking request.

Consumes replies, produces numbered requests; waits for the broker alone, no longer than ``queue.dead_after_s``
beyond the ``wait_s`` that the request itself asks for, and then raises PeerTimeout naming the endpoint.
A request that got no answer is sent again under its number, and the broker answers a repeat from memory. Where messages were lost
before a request, the broker refuses it, and the client greets again and asks anew.

Source: design note, section 4; faults B51, B56.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import AsyncRLError, ConfigError, LostMessage, PeerTimeout, SchemaError, UnknownSession
from asyncrl.queue.contexts import end_context, hold_context
from asyncrl.queue.curve import secure_client
from asyncrl.queue.keys import SERVER_NAME
from asyncrl.queue.ledger import EMPTY
from asyncrl.queue.messages import Frontier, Hello, Refused, RequestBody, Role, Welcome
from asyncrl.queue.wire import Dialogue

__all__ = ["FULL_PAUSE_S", "START_TIMEOUT_S", "BlockingClient", "dialogue_for", "expect", "no_answer", "open_socket", "run_of"]

START_TIMEOUT_S = 120.0
FULL_PAUSE_S = 0.02
START_PAUSE_S = 0.1
SEND_HWM = 64

R = TypeVar("R")


def run_of(run_dir: Path | str, timeout_s: float) -> tuple[Config, RunFacts]:
    """Options and facts of a run directory; waits up to ``timeout_s`` for a start that is still writing them.

    Raises:
        DataError: there are none.
    """
    directory, deadline_s = RunDir(run_dir), time.monotonic() + timeout_s
    while not directory.facts_file.exists() and time.monotonic() < deadline_s:
        time.sleep(START_PAUSE_S)
    return directory.read_config(), directory.read_facts()


def dialogue_for(config: Config, facts: RunFacts, name: str, shard: int) -> Dialogue:
    """The conversation of ``name`` with a broker of this run."""
    return Dialogue(
        endpoint=facts.queue_endpoints[shard],
        run_id=facts.run_id,
        sender=name,
        max_message_bytes=config.queue.max_message_mib << 20,
        keys=config.queue.keys,
    )


def open_socket(socket: zmq.Socket[Any], dialogue: Dialogue) -> None:
    """Sets identity, keys, limits and linger, and connects; closes the socket if its keys cannot be used.

    Every request is acknowledged, so nothing needs to linger when a client closes.

    Raises:
        ConfigError: a key that is missing, malformed or, if secret, readable by others.
    """
    if dialogue.keys:
        try:
            secure_client(socket, Path(dialogue.keys), dialogue.sender, SERVER_NAME)
        except ConfigError:
            socket.close(linger=0)
            raise
    # the identity is that of this process's life, so that a second process under the same name is told apart
    socket.setsockopt(zmq.IDENTITY, f"{dialogue.sender}.{uuid.uuid4().hex}".encode())
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HWM)
    socket.setsockopt(zmq.RCVHWM, SEND_HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, dialogue.max_message_bytes)
    socket.connect(dialogue.endpoint)


def no_answer(dialogue: Dialogue, body: RequestBody, waited_s: float) -> PeerTimeout:
    """The error of a request whose deadline passed."""
    keys = f", and whether it lets in the key of {dialogue.sender} in {dialogue.keys}" if dialogue.keys else ""
    return PeerTimeout(
        f"the queue at {dialogue.endpoint} answers within {waited_s:.1f} s; {type(body).__name__} of {dialogue.sender} got no "
        f"answer: look at the queue's log{keys}",
        endpoint=dialogue.endpoint,
        sender=dialogue.sender,
    )


def expect(kind: type[R], body: Any, dialogue: Dialogue) -> R:
    """The reply, if it is of the right kind; SchemaError otherwise."""
    if isinstance(body, kind):
        return body
    raise SchemaError(f"{dialogue.endpoint} answers with {kind.__name__}; met {type(body).__name__}")


class BlockingClient:
    """One request at a time to one broker, each with a deadline. A broker that was started again is greeted again."""

    role = Role.OBSERVER

    def __init__(self, dialogue: Dialogue, incarnation: int, answer_s: float) -> None:
        self._dialogue = dialogue
        self._answer_s = answer_s
        self.incarnation = incarnation
        self.frontier = EMPTY
        self._context: zmq.Context[zmq.Socket[bytes]] = hold_context(zmq.Context())
        self._socket = self._context.socket(zmq.DEALER)
        open_socket(self._socket, dialogue)

    @classmethod
    def open(
        cls,
        config: Config,
        facts: RunFacts,
        name: str,
        shard: int = 0,
        timeout_s: float = START_TIMEOUT_S,
        restore: Frontier | None = None,
        answer_s: float | None = None,
    ) -> Self:
        """Connects and says hello; waits up to ``timeout_s`` for a broker that is still starting.

        Args:
            answer_s: how long each answer is waited for; ``queue.dead_after_s`` if not given.

        Raises:
            PeerTimeout: nobody answered. FencedError: a newer incarnation has taken over.
        """
        client = cls(dialogue_for(config, facts, name, shard), facts.incarnation, answer_s or config.queue.dead_after_s)
        try:
            client.hello(timeout_s, restore=restore)
        except AsyncRLError:
            client.close()
            raise
        return client

    @property
    def max_message_bytes(self) -> int:
        """The largest frame that goes over this connection."""
        return self._dialogue.max_message_bytes

    def hello(self, timeout_s: float, again: bool = False, restore: Frontier | None = None) -> None:
        """Greets the broker; ``frontier`` is then what it has settled."""
        body = Hello(role=self.role, incarnation=self.incarnation, again=again, restore=restore)
        answer, _ = self._ask_once(body, time.monotonic() + timeout_s, 0.0)
        self.frontier = expect(Welcome, answer, self._dialogue).frontier

    def close(self) -> None:
        """Closes the socket at once; every request has had its answer."""
        self._socket.close(linger=0)
        end_context(self._context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def ask(self, body: RequestBody, extra_s: float = 0.0) -> tuple[Any, list[Any]]:
        """Body and payload frames of the reply; raises what the broker refused, or PeerTimeout."""
        deadline_s = time.monotonic() + self._answer_s + extra_s
        while True:
            try:
                return self._ask_once(body, deadline_s, extra_s)
            except (UnknownSession, LostMessage):
                self.hello(deadline_s - time.monotonic(), again=True)

    def _ask_once(self, body: RequestBody, deadline_s: float, extra_s: float) -> tuple[Any, list[Any]]:
        sequence, frames = self._dialogue.request(body)
        due_s = started_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise no_answer(self._dialogue, body, now_s - started_s)
            if now_s >= due_s and self._send(frames):
                self._dialogue.sent(sequence)  # a number whose deadline passed before it was sent would leave a gap
                due_s = now_s + self._answer_s / 3 + extra_s
            answer = self._receive(sequence, min(due_s, deadline_s) - now_s)
            if answer is not None:
                return answer

    def _send(self, frames: list[Any]) -> bool:
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        except zmq.Again:
            time.sleep(FULL_PAUSE_S)
            return False
        return True

    def _receive(self, sequence: int, timeout_s: float) -> tuple[Any, list[Any]] | None:
        if not self._socket.poll(max(1, int(timeout_s * 1000))):
            return None
        frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
        number, body, payloads = self._dialogue.reply(frames)
        if number not in (sequence, -1):  # the second answer to a request that was sent twice
            return None
        if isinstance(body, Refused):
            raise self._dialogue.refusal(body)
        return body, payloads
