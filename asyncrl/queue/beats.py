"""A producer's signs of life to its brokers: all are told at once, and a silent one holds up none of the others.

Consumes heartbeats, produces one pending request a broker; what is said meanwhile follows as soon as that one is answered. A round
waits for the brokers that answered last time, at most a third of ``queue.dead_after_s``, so that the next one comes before the others
take the producer for dead. A late broker is waited for in the background, by a task that is owned here, and is silent until it answers.

Source: design note, section 4.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from asyncrl.errors import AsyncRLError, PeerTimeout
from asyncrl.queue.messages import Done, Heartbeat
from asyncrl.queue.producer import ProducerLink

__all__ = ["Beats"]

log = logging.getLogger(__name__)


class Beats:
    """Heartbeats of one producer.

    Args:
        links: to the brokers.
        patience_s: how long a round waits at most while some broker answers.
    """

    def __init__(self, links: Sequence[ProducerLink], patience_s: float) -> None:
        self._links = links
        self._patience_s = patience_s
        self._due: dict[int, Heartbeat] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._silent: dict[int, PeerTimeout | None] = {}

    def silent(self, number: int) -> bool:
        """Whether a broker left a request without an answer and has not answered a beat since."""
        return number in self._silent

    def missed(self, number: int, error: PeerTimeout) -> None:
        """A request to a broker got no answer within its deadline."""
        log.warning("%s", error)
        self._silent[number] = error

    async def round(self, bodies: Sequence[Heartbeat]) -> None:
        """Tells each broker its body.

        Raises:
            PeerTimeout: none of them answered within its deadline. AsyncRLError: what a broker refused.
        """
        self._raise_refusal()
        for number, body in enumerate(bodies):
            self._due[number] = body
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(self._tell(number), name=f"heartbeats to shard {number}")
        await self._wait()
        self._raise_refusal()
        errors = [error for error in self._silent.values() if error is not None]
        if len(errors) == len(self._links):
            raise errors[-1]

    async def close(self) -> None:
        """Ends the beats that wait; a round that waits for them fails with PeerTimeout."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _wait(self) -> None:
        """Until those that were not silent have answered or are late; where all are silent, until one answers or all deadlines passed."""
        expected = {number: task for number, task in self._tasks.items() if number not in self._silent}
        if expected:
            await asyncio.wait(expected.values(), timeout=self._patience_s)
        for number, task in expected.items():
            if not task.done():
                self._silent.setdefault(number, None)
        while len(self._silent) == len(self._links) and (waiting := [task for task in self._tasks.values() if not task.done()]):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    async def _tell(self, number: int) -> None:
        while (body := self._due.pop(number, None)) is not None:
            try:
                await self._links[number].ask(Done, body)
            except PeerTimeout as error:
                self.missed(number, error)
                return
            except AsyncRLError:
                self._silent.pop(number, None)
                raise
            self._silent.pop(number, None)

    def _raise_refusal(self) -> None:
        """Forgets the tasks that ended, and raises the first error among them."""
        ended = [self._tasks.pop(number) for number, task in list(self._tasks.items()) if task.done()]
        errors = [error for task in ended if (error := _error_of(task)) is not None]
        if errors:
            raise errors[0]


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return PeerTimeout("a heartbeat waits while its producer is open; this one was closed") if task.cancelled() else task.exception()
