"""The rollout loop of one generator.

It consumes tickets and committed versions, and produces groups::

            ┌───────────── blocked: ask again ─────────────┐
            v                                              │
    serving? ──> room for a group? ──> tickets(version) ───┤
       ^               ^                                   ├─ ticket ──> sample ──> score ──> put
       │               └────────── a group ends <──────────┼─────────────────────────────────┘
       │                                                   ├─ advance (lockstep): let the held update commit
       └── receiver: version committed                     └─ stopping: end

What it waits for, and who unblocks it: ``serving``: the publisher, by a full update, or its silence, by PeerTimeout; room: the
engine, by a finished response, or the ticket's deadline; tickets: the queue, which answers within ``TICKET_WAIT_S``, or
its client's PeerTimeout. While an update is being loaded nothing here waits: requests simply stand still inside the engine.

A heartbeat goes to the queue every ``queue.heartbeat_s`` and after every commit. Any task that dies ends the loop with its error.

Source: design note, sections 4 to 6.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from asyncrl.config import Config
from asyncrl.errors import DataError, EngineError, FencedError, ProcessDied, QueueError
from asyncrl.generators.engine import GeneratorEngine
from asyncrl.generators.groups import GroupSampler, UnusablePromptError
from asyncrl.queue.messages import Ticket, Tickets
from asyncrl.sync.receiver import Receiver
from asyncrl.trajectory import TrajectoryGroup

__all__ = ["Rollout", "TicketQueue"]

log = logging.getLogger(__name__)
TICKET_WAIT_S = 2.0
LOG_EVERY_S = 10.0
GIVE_BACK_S = 2.0


class TicketQueue(Protocol):
    """What the loop needs of :class:`asyncrl.queue.client.Producer`."""

    async def tickets(self, version: int, n: int, wait_s: float) -> Tickets:
        """Up to ``n`` tickets for a committed version."""

    async def put(self, groups: list[TrajectoryGroup]) -> list[str]:
        """Hands groups over; one outcome each."""

    async def fail(self, ticket: int, attempt: int, reason: str, final: bool = False) -> None:
        """Gives a ticket back, or drops it for good."""

    async def heartbeat(self, version: int, in_flight: dict[int, int], sampled_tokens: int) -> None:
        """Says that this generator lives."""

    async def settled(self, stall_s: float) -> None:
        """Waits until nobody needs payload that stayed here; PeerTimeout when nothing was settled for so long."""


class Rollout:
    """Keeps up to ``generator.max_groups`` groups running until the queue stops or :meth:`stop` is called.

    Raises:
        EngineError: the engine does not declare tempered log-probs (fault B01).
    """

    def __init__(self, config: Config, engine: GeneratorEngine, receiver: Receiver, queue: TicketQueue, sampler: GroupSampler) -> None:
        if engine.logprobs_mode != "processed":
            raise EngineError(
                f"training needs log-probs with the temperature inside the softmax; engine {engine.name} declares {engine.logprobs_mode!r}"
            )
        self._config = config
        self._engine = engine
        self._receiver = receiver
        self._queue = queue
        self._sampler = sampler
        self._one_at_a_time = config.queue.schedule == "lockstep" and not engine.batch_invariant
        self._running: dict[asyncio.Task[None], Ticket] = {}
        self._stop = asyncio.Event()
        self._told_s = time.monotonic()

    def stop(self) -> None:
        """Ends the loop; running groups are given back."""
        self._stop.set()

    async def run(self, receiving: asyncio.Task[None]) -> None:
        """Samples until stopped. ``receiving`` is the receiver's task; its death ends the loop.

        Raises:
            EngineError, QueueError, PeerTimeout, SyncError: whichever task failed first.
        """
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._fill(), name="tickets"),
            asyncio.create_task(self._heartbeats(), name="heartbeats"),
        ]
        try:
            while True:
                watched: list[asyncio.Task[Any]] = [*tasks, stopped, receiving, *self._running]
                done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED, timeout=1.0)
                for task in done - {stopped}:
                    _raise_if_dead(task, expected=task in self._running or task is tasks[0])
                    self._running.pop(task, None)
                if stopped in done or tasks[0] in done:
                    return
        finally:
            await self._end([*tasks, stopped])

    # loops --------------------------------------------------------------------------------------

    async def _fill(self) -> None:
        while True:
            if not self._receiver.ready.is_set():
                await self._say("waiting for a full update: no ticket is asked for before it is committed")
                await _either(self._receiver.ready.wait(), 1.0)
                continue
            limit = 1 if self._one_at_a_time else self._config.generator.max_groups
            room = limit - sum(not task.done() for task in self._running)
            if room <= 0:
                await asyncio.wait(list(self._running), return_when=asyncio.FIRST_COMPLETED, timeout=1.0)
                continue
            version = self._engine.version
            reply = await self._queue.tickets(version, room, TICKET_WAIT_S)
            for ticket in reply.tickets:
                self._running[asyncio.create_task(self._group(ticket), name=f"group {ticket.group_id}")] = ticket
            if reply.stopping:
                log.info("the queue is stopping")
                await self._queue.settled(self._config.launch.stall_timeout_s)
                return
            if reply.advance:
                await self._advance(version)
            elif not reply.tickets:
                await self._say(f"waiting for tickets: {reply.blocked or 'none yet'}")

    async def _advance(self, version: int) -> None:
        """Lockstep: lets the held update commit once nothing here is sampled by ``version`` any more."""
        running = [task for task in self._running if not task.done()]
        if running:
            await asyncio.wait(running, timeout=1.0)
            return
        self._receiver.advance(version)
        await self._say(f"waiting for the update after version {version}")
        if self._engine.version == version:
            await _either(self._receiver.committed.wait(), 1.0)

    async def _heartbeats(self) -> None:
        while True:
            self._receiver.committed.clear()
            in_flight = self._engine.in_flight_tokens()
            await self._queue.heartbeat(self._engine.version, in_flight, self._sampler.sampled_tokens)
            await _either(self._receiver.committed.wait(), self._config.queue.heartbeat_s)

    # one group ----------------------------------------------------------------------------------

    async def _group(self, ticket: Ticket) -> None:
        try:
            async with asyncio.timeout(self._config.queue.ticket_deadline_s):
                group = await self._sampler.sample(ticket)
        except UnusablePromptError as error:
            log.warning("ticket %d is dropped as unusable: %s", ticket.ticket, error)
            await self._queue.fail(ticket.ticket, ticket.attempt, str(error), final=True)
            return
        except (DataError, TimeoutError) as error:
            reason = str(error) or f"not finished within queue.ticket_deadline_s={self._config.queue.ticket_deadline_s:g}"
            log.warning("ticket %d is given back: %s", ticket.ticket, reason)
            await self._queue.fail(ticket.ticket, ticket.attempt, reason)
            return
        await self._put(ticket, group)

    async def _put(self, ticket: Ticket, group: TrajectoryGroup) -> None:
        try:
            (outcome,) = await self._queue.put([group])
        except FencedError:
            raise
        except QueueError as error:
            log.error("group %s of ticket %d cannot be put: %s", ticket.group_id, ticket.ticket, error)
            await self._queue.fail(ticket.ticket, ticket.attempt, str(error), final=True)
            return
        if outcome.startswith("refused"):
            log.error("group %s of ticket %d is %s", ticket.group_id, ticket.ticket, outcome)

    # the end ------------------------------------------------------------------------------------

    async def _end(self, tasks: list[asyncio.Task[Any]]) -> None:
        tickets = [ticket for task, ticket in self._running.items() if not task.done()]
        for task in [*tasks, *self._running]:
            task.cancel()
        await asyncio.wait([*tasks, *self._running], timeout=GIVE_BACK_S)
        if not self._stop.is_set():
            return
        log.info("stopping: %d groups are given back", len(tickets))
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                for ticket in tickets:
                    await self._queue.fail(ticket.ticket, ticket.attempt, "its generator was stopped")
        except (QueueError, TimeoutError) as error:
            log.warning("not all groups could be given back: %s; the queue issues them again by itself", error or "no answer")

    async def _say(self, what: str) -> None:
        if time.monotonic() - self._told_s > LOG_EVERY_S:
            self._told_s = time.monotonic()
            log.info(what)


async def _either(wait: Coroutine[Any, Any, Any], seconds: float) -> None:
    try:
        await asyncio.wait_for(wait, seconds)
    except TimeoutError:
        return


def _raise_if_dead(task: asyncio.Task[Any], *, expected: bool) -> None:
    if task.cancelled():
        raise ProcessDied(f"task {task.get_name()} of the generator was cancelled")
    error = task.exception()
    if error is not None:
        raise error
    if not expected:
        raise ProcessDied(f"task {task.get_name()} of the generator ended by itself")
