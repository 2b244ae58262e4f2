"""A producer's conversation with one broker, for asyncio; :class:`asyncrl.queue.client.Producer` holds one for each shard.

Requests overlap up to ``MAX_OUTSTANDING``; each waits for the broker with a deadline. One reader task, owned by the link, hands
replies to their callers; if it dies, they fail. A broker that was started again, or to which messages were lost, is greeted again, and
what waited is asked anew.

Source: design note, section 4; faults B51, B56.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from asyncrl.config import Config
from asyncrl.config.run_dir import RunFacts
from asyncrl.errors import AsyncRLError, LostMessage, UnknownSession, VersionError
from asyncrl.queue.connection import FULL_PAUSE_S, START_TIMEOUT_S, dialogue_for, expect, no_answer, open_socket
from asyncrl.queue.contexts import end_context, hold_context
from asyncrl.queue.messages import Done, Fail, Heartbeat, Hello, Outcomes, Put, Refused, RequestBody, Role, TicketRequest, Tickets, Welcome
from asyncrl.queue.wire import Dialogue

__all__ = ["ProducerLink"]

MAX_OUTSTANDING = 16
MAX_HELD = 1 << 14

R = TypeVar("R")


class ProducerLink:
    """One broker, as a generator talks to it.

    Attributes:
        acknowledged: the newest version that the broker has heard from this process, -1 before the first.
        on_released: is told names of payload that may be written again, out of whatever answer, also of one that nobody waits for.
    """

    def __init__(self, dialogue: Dialogue, incarnation: int, answer_s: float) -> None:
        self._dialogue = dialogue
        self._incarnation = incarnation
        self._answer_s = answer_s
        self._context = hold_context(zmq.asyncio.Context())
        self._socket = self._context.socket(zmq.DEALER)
        open_socket(self._socket, dialogue)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._untaken: list[Tickets] = []
        self._abandoned: set[int] = set()
        self._held: OrderedDict[int, int] = OrderedDict()
        self._slots = asyncio.Semaphore(MAX_OUTSTANDING)
        self._greeting = asyncio.Lock()
        self._greeted = 0
        self._version = self.acknowledged = -1
        self.on_released: Callable[[Sequence[str]], None] = lambda names: None
        self._released_in: OrderedDict[int, None] = OrderedDict()
        self._reader = asyncio.create_task(self._read(), name=f"queue replies of {dialogue.sender}")

    @classmethod
    async def open(cls, config: Config, facts: RunFacts, name: str, shard: int, timeout_s: float = START_TIMEOUT_S) -> ProducerLink:
        """Connects and says hello; waits up to ``timeout_s`` for a broker that is still starting."""
        link = cls(dialogue_for(config, facts, name, shard), facts.incarnation, config.queue.dead_after_s)
        try:
            await link._hello(timeout_s, again=False)
        except AsyncRLError:
            await link.close()
            raise
        return link

    @property
    def name(self) -> str:
        """Of the producer."""
        return self._dialogue.sender

    @property
    def max_message_bytes(self) -> int:
        """The largest frame that the broker takes."""
        return self._dialogue.max_message_bytes

    def check_size(self, num_bytes: int) -> None:
        """Raises QueueError for a frame that the broker would not take."""
        self._dialogue.check_size(num_bytes)

    async def tickets(self, version: int, n: int, wait_s: float) -> Tickets:
        """Up to ``n`` tickets; those granted to a call that was cancelled are handed to the next one."""
        if self._untaken:
            return self._take_up(n)
        return await self.ask(Tickets, TicketRequest(version=version, max_tickets=n, wait_s=wait_s), extra_s=wait_s)

    def _take_up(self, n: int) -> Tickets:
        """The first ``n`` of what was granted to a cancelled call; the rest waits on, and its ``advance`` holds once they are out too."""
        first = self._untaken.pop(0)
        if len(first.tickets) <= n:
            return first
        self._untaken.insert(0, msgspec.structs.replace(first, tickets=first.tickets[n:]))
        return msgspec.structs.replace(first, tickets=first.tickets[:n], advance=False)

    async def ask(self, kind: type[R], body: RequestBody, payloads: Sequence[Any] = (), extra_s: float = 0.0) -> R:
        """The reply to a request.

        Raises:
            PeerTimeout: none came in time. AsyncRLError: what the broker refused.
        """
        async with self._slots:
            deadline_s = time.monotonic() + self._answer_s + extra_s
            while True:
                greeted = self._greeted
                try:
                    answer = await self._ask_once(kind, body, payloads, deadline_s, extra_s)
                    self._answered(body, answer)
                    return answer
                except VersionError:
                    self._version = self.acknowledged
                    raise
                except (UnknownSession, LostMessage):
                    async with self._greeting:
                        # tickets that came to nobody are issued again with a hello
                        if greeted == self._greeted or isinstance(body, TicketRequest):
                            await self._hello(deadline_s - time.monotonic(), again=True)

    async def close(self) -> None:
        """Ends the reader and closes the socket; requests still waiting fail with PeerTimeout."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._socket.close(linger=0)
        end_context(self._context)

    async def _hello(self, timeout_s: float, again: bool) -> None:
        body = Hello(role=Role.PRODUCER, incarnation=self._incarnation, again=again, tickets=tuple(self._held.items()))
        await self._ask_once(Welcome, body, (), time.monotonic() + timeout_s, 0.0)
        self._greeted += 1

    async def _ask_once(self, kind: type[R], body: RequestBody, payloads: Sequence[Any], deadline_s: float, extra_s: float) -> R:
        started_s = time.monotonic()
        sequence, frames = await self._send_first(body, payloads, deadline_s)
        future = self._waiting[sequence]
        pause_s = self._answer_s / 3 + extra_s
        try:
            while True:
                left_s = deadline_s - time.monotonic()
                await asyncio.wait([future, self._reader], timeout=max(0.0, min(pause_s, left_s)), return_when=asyncio.FIRST_COMPLETED)
                if future.done():
                    return expect(kind, future.result(), self._dialogue)
                if self._reader.done():
                    raise self._reader.exception() or no_answer(self._dialogue, body, time.monotonic() - started_s)
                if time.monotonic() >= deadline_s:
                    raise no_answer(self._dialogue, body, time.monotonic() - started_s)
                self._try_send(frames)
        finally:
            self._waiting.pop(sequence, None)
            # a request that was refused for what went before it may have been taken when it was sent again
            if isinstance(body, TicketRequest) and (not future.done() or isinstance(future.exception(), LostMessage)):
                self._abandoned.add(sequence)

    def _at_newest(self, body: RequestBody) -> RequestBody:
        """A request that waited, for a broker or for its turn, with the newest version that was said meanwhile."""
        if not isinstance(body, TicketRequest | Heartbeat):
            return body
        self._version = max(self._version, body.version)
        return body if body.version == self._version else msgspec.structs.replace(body, version=self._version)

    async def _send_first(self, body: RequestBody, payloads: Sequence[Any], deadline_s: float) -> tuple[int, list[Any]]:
        while True:
            # numbered and sent without an await in between: a cancelled call leaves no gap
            sequence, frames = self._dialogue.request(self._at_newest(body), payloads)
            if self._try_send(frames):
                self._dialogue.sent(sequence)
                self._waiting[sequence] = asyncio.get_running_loop().create_future()
                return sequence, frames
            if time.monotonic() >= deadline_s:
                raise no_answer(self._dialogue, body, self._answer_s)
            await asyncio.sleep(FULL_PAUSE_S)

    def _try_send(self, frames: list[Any]) -> bool:
        # with NOBLOCK pyzmq settles the future before it hands it back
        attempt: Any = self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        error = attempt.exception()
        if isinstance(error, zmq.Again):
            return False
        if error is not None:
            raise error
        return True

    async def _read(self) -> None:
        while True:
            frames = [frame.buffer for frame in await self._socket.recv_multipart(copy=False)]
            self._settle(*self._dialogue.reply(frames)[:2])

    def _answered(self, body: RequestBody, answer: Any) -> None:
        """What was put or failed is held no more; a version that was heard is known."""
        if isinstance(body, TicketRequest | Heartbeat):
            self.acknowledged = max(self.acknowledged, body.version)
        done: list[tuple[int, int]] = []
        if isinstance(body, Fail):
            done.append((body.ticket, body.attempt))
        elif isinstance(body, Put):
            outcomes = zip(body.groups, answer.outcomes, strict=True)
            done += [(item.meta.ticket, item.meta.attempt) for item, outcome in outcomes if not outcome.startswith("held: ")]
        for ticket, attempt in done:
            if self._held.get(ticket) == attempt:
                del self._held[ticket]

    def _hold(self, tickets: Tickets) -> None:
        """Notes tickets as they arrive, before any later answer is read: a hello says which ones came."""
        for ticket in tickets.tickets:
            self._held[ticket.ticket] = ticket.attempt
            self._held.move_to_end(ticket.ticket)
        while len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def _release(self, sequence: int, names: Sequence[str]) -> None:
        """Tells each name once: a repeated answer has it again."""
        if sequence in self._released_in:
            return
        self._released_in[sequence] = None
        if len(self._released_in) > MAX_HELD:
            self._released_in.popitem(last=False)
        self.on_released(names)

    def _settle(self, sequence: int, body: Any) -> None:
        if isinstance(body, Tickets):
            self._hold(body)
        if isinstance(body, Done | Outcomes) and body.released:
            self._release(sequence, body.released)
        if sequence in self._abandoned:
            self._abandoned.discard(sequence)
            if isinstance(body, Tickets):
                self._untaken.append(body)
            return
        for future in list(self._waiting.values()) if sequence == -1 else [self._waiting.get(sequence)]:
            if future is None or future.done():  # the second answer to a request that was sent twice
                continue
            if isinstance(body, Refused):
                future.set_exception(self._dialogue.refusal(body))
            else:
                future.set_result(body)
