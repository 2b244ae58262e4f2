"""Clients of the broker: :class:`Producer` (asyncio), :class:`Consumer` and :class:`Observer` (blocking).

Each waits for the broker alone, no longer than ``queue.dead_after_s`` beyond the ``wait_s`` that a request itself
asks for, and then raises PeerTimeout.

Source: design note, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.queue.connection import BlockingClient, expect
from asyncrl.queue.messages import (
    Commit,
    Committed,
    Done,
    Fetch,
    Lease,
    LeaseRequest,
    Payloads,
    ProducerGone,
    QueueStatus,
    Return,
    Role,
    Status,
    StatusRequest,
    Stop,
)
from asyncrl.queue.producer import Producer
from asyncrl.trajectory import TrajectoryGroup

__all__ = ["Consumer", "Observer", "Producer"]


class Consumer(BlockingClient):
    """The learner's client: leases, payloads, commits.

    Raises (each method):
        PeerTimeout: the broker did not answer. FencedError: a newer incarnation leases now.
        QueueError: the request does not fit the state of the queue. ProcessDied: no producer is left to wait for.

    Example:
        >>> with Consumer.connect(config, facts, "learner-0") as consumer:  # doctest: +SKIP
        ...     lease = consumer.lease(0, wait_s=1.0)
        ...     groups = consumer.fetch([meta.ticket for meta in lease.groups])
        ...     frontier = consumer.commit(0).frontier
    """

    role = Role.CONSUMER

    def lease(self, step: int, wait_s: float) -> Lease:
        """The batch of training step ``step``; empty with ``blocked`` when it was not ready within ``wait_s``.

        Comes back early when a producer died, so that the caller can say who. ``ended``: no batch will come any more.
        """
        body = LeaseRequest(step=step, incarnation=self.incarnation, wait_s=wait_s)
        return expect(Lease, self.ask(body, wait_s)[0], self._dialogue)

    def fetch(self, tickets: Sequence[int]) -> list[TrajectoryGroup]:
        """Payloads of leased groups in the order asked; their CRC-32 was checked."""
        if not tickets:
            return []
        body, frames = self.ask(Fetch(tickets=tuple(tickets)))
        return self._dialogue.groups(expect(Payloads, body, self._dialogue), frames)

    def commit(self, step: int) -> Committed:
        """Training step ``step`` is in the weights; asking again gives the same answer."""
        return expect(Committed, self.ask(Commit(step=step, incarnation=self.incarnation))[0], self._dialogue)

    def return_(self, step: int) -> None:
        """Gives the lease of ``step`` back untrained; without such a lease nothing happens."""
        expect(Done, self.ask(Return(step=step, incarnation=self.incarnation))[0], self._dialogue)

    def status(self) -> QueueStatus:
        """Counts of the moment."""
        return expect(Status, self.ask(StatusRequest())[0], self._dialogue).status


class Observer(BlockingClient):
    """The driver's client: counts, deaths seen by the supervisor, stop.

    Example:
        >>> with Observer.connect(config, facts, "driver") as observer:  # doctest: +SKIP
        ...     observer.status().admitted
    """

    role = Role.OBSERVER

    def status(self) -> QueueStatus:
        """Counts of the moment."""
        return expect(Status, self.ask(StatusRequest())[0], self._dialogue).status

    def producer_gone(self, name: str) -> None:
        """The supervisor saw producer ``name`` die: its tickets are issued again at once."""
        expect(Done, self.ask(ProducerGone(name=name))[0], self._dialogue)

    def stop(self, exit: bool = False) -> None:
        """No more tickets; with ``exit`` the broker answers and ends."""
        expect(Done, self.ask(Stop(exit=exit))[0], self._dialogue)
