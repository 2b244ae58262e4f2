"""The generator's client of the broker, for asyncio. Import it from :mod:`asyncrl.queue.client`.

Consumes tickets, produces finished groups and heartbeats. Requests overlap up to ``MAX_OUTSTANDING``; each waits for
the broker with a deadline. One reader task, owned by the producer, hands replies to their callers; if it dies, they fail.

Source: design note, section 4; faults B51, B56.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from asyncrl.config import Config
from asyncrl.config.run_dir import RunFacts
from asyncrl.errors import AsyncRLError
from asyncrl.queue.connection import FULL_PAUSE_S, START_TIMEOUT_S, dialogue_for, expect, no_answer, open_socket
from asyncrl.queue.messages import Done, Fail, Heartbeat, Hello, Outcomes, Put, Refused, RequestBody, Role, TicketRequest, Tickets, Welcome
from asyncrl.queue.wire import Dialogue, checksum
from asyncrl.trajectory import TrajectoryGroup, encode_group

__all__ = ["Producer"]

MAX_OUTSTANDING = 16

R = TypeVar("R")


class Producer:
    """A generator's client. Calls may overlap: a put or a heartbeat does not wait behind a ticket request.

    Send a heartbeat right after each committed weight update: a ticket request that waits is looked at again with the new version.

    Raises (each method):
        PeerTimeout: the broker did not answer. QueueError: a message over the size limit, refused before it is sent.
        VersionError: a version lower than this producer said before, or above the learner's step.
        FencedError: the broker belongs to a newer start of the run.

    Example:
        >>> producer = await Producer.connect(config, facts, "generator-0")  # doctest: +SKIP
        >>> tickets = await producer.tickets(version=0, n=4, wait_s=1.0)     # doctest: +SKIP
        >>> await producer.put([group])                                      # doctest: +SKIP
        ['accepted']
    """

    def __init__(self, dialogue: Dialogue, answer_s: float) -> None:
        self._dialogue = dialogue
        self._answer_s = answer_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        open_socket(self._socket, dialogue)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._untaken: list[Tickets] = []
        self._abandoned: set[int] = set()
        self._slots = asyncio.Semaphore(MAX_OUTSTANDING)
        self._reader = asyncio.create_task(self._read(), name=f"queue replies of {dialogue.sender}")

    @classmethod
    async def connect(cls, config: Config, facts: RunFacts, name: str, timeout_s: float = START_TIMEOUT_S) -> Producer:
        """Connects and says hello; waits up to ``timeout_s`` for a broker that is still starting."""
        producer = cls(dialogue_for(config, facts, name), config.queue.dead_after_s)
        try:
            hello = Hello(role=Role.PRODUCER, incarnation=facts.incarnation)
            await producer._ask(Welcome, hello, extra_s=timeout_s - producer._answer_s)
        except AsyncRLError:
            await producer.close()
            raise
        return producer

    async def tickets(self, version: int, n: int, wait_s: float) -> Tickets:
        """Up to ``n`` tickets for the committed ``version``; none with ``blocked`` when the gate stayed shut for ``wait_s``.

        Tickets granted to a call that was cancelled are handed to the next one.
        """
        if self._untaken:
            return self._untaken.pop(0)
        return await self._ask(Tickets, TicketRequest(version=version, max_tickets=n, wait_s=wait_s), extra_s=wait_s)

    async def put(self, groups: Sequence[TrajectoryGroup]) -> list[str]:
        """Hands finished groups over; one outcome each: accepted, duplicate, late, no_signal or ``refused: REASON``."""
        payloads = [encode_group(group) for group in groups]
        for payload in payloads:
            self._dialogue.check_size(payload.size)
        outcomes: list[str] = []
        for group, payload in zip(groups, payloads, strict=True):
            key = (group.ticket, group.trajectories[0].attempt)
            body = Put(tickets=(key,), checksums=(checksum(payload),))
            outcomes.extend((await self._ask(Outcomes, body, [payload])).outcomes)
        return outcomes

    async def fail(self, ticket: int, attempt: int, reason: str, final: bool = False) -> None:
        """The ticket could not be finished; ``final`` drops it as unusable instead of issuing it again."""
        await self._ask(Done, Fail(ticket=ticket, attempt=attempt, reason=reason, final=final))

    async def heartbeat(self, version: int, in_flight: dict[int, int], sampled_tokens: int) -> None:
        """Alive: the committed version, tokens in flight by version, tokens sampled so far by this process."""
        await self._ask(Done, Heartbeat(version=version, in_flight=in_flight, sampled_tokens=sampled_tokens))

    async def close(self) -> None:
        """Ends the reader and closes the socket; requests still waiting fail with PeerTimeout."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._socket.close(linger=0)
        self._context.term()

    async def _ask(self, kind: type[R], body: RequestBody, payloads: Sequence[Any] = (), extra_s: float = 0.0) -> R:
        async with self._slots:
            started_s = time.monotonic()
            deadline_s = started_s + self._answer_s + extra_s
            sequence, frames = await self._send_first(body, payloads, deadline_s)
            future = self._waiting[sequence]
            pause_s = self._answer_s / 3 + (0.0 if isinstance(body, Hello) else extra_s)
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
                if not future.done() and isinstance(body, TicketRequest):
                    self._abandoned.add(sequence)

    async def _send_first(self, body: RequestBody, payloads: Sequence[Any], deadline_s: float) -> tuple[int, list[Any]]:
        while True:
            # numbered and sent without an await in between: a cancelled call leaves no gap
            sequence, frames = self._dialogue.request(body, payloads)
            if self._try_send(frames):
                self._dialogue.sent(sequence)
                self._waiting[sequence] = asyncio.get_running_loop().create_future()
                return sequence, frames
            if time.monotonic() >= deadline_s:
                raise no_answer(self._dialogue, body, self._answer_s)
            await asyncio.sleep(FULL_PAUSE_S)

    def _try_send(self, frames: list[Any]) -> bool:
        # with NOBLOCK pyzmq settles the future before it hands it back
        attempt: Any = self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
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

    def _settle(self, sequence: int, body: Any) -> None:
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
