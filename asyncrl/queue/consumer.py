"""The learner's client: leases, payloads, commits, over one broker or several.

A step takes from every living shard its share, and more from the others where one is dead. A shard that comes back hears of the
steps that it missed before it is asked for groups again: those of its batches that were trained are committed, others returned.

Source: design note, section 4.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from asyncrl.config import Config
from asyncrl.config.network import is_local
from asyncrl.config.run_dir import RunFacts
from asyncrl.errors import AsyncRLError, PeerTimeout
from asyncrl.queue.connection import START_TIMEOUT_S, BlockingClient, expect, run_of
from asyncrl.queue.ledger import merge_frontiers
from asyncrl.queue.messages import (
    Checkpointed,
    Commit,
    Committed,
    Done,
    Fetch,
    Frontier,
    Lease,
    LeaseRequest,
    Payloads,
    QueueStatus,
    Return,
    Role,
    Status,
    StatusRequest,
)
from asyncrl.queue.observing import merged_status
from asyncrl.queue.payload_reader import PayloadReader
from asyncrl.queue.puller import Puller
from asyncrl.queue.settings import share_of
from asyncrl.trajectory import GroupMeta, TrajectoryGroup

__all__ = ["Consumer", "ConsumerLink"]

log = logging.getLogger(__name__)
PROBE_S = 0.3

Damaged = Sequence[tuple[int, int, str]]


class ConsumerLink(BlockingClient):
    """The learner's conversation with one broker."""

    role = Role.CONSUMER
    _files = True

    def lease(self, step: int, wait_s: float, extra: int = 0) -> Lease:
        """This shard's part of the batch of ``step``."""
        body = LeaseRequest(step=step, incarnation=self.incarnation, wait_s=wait_s, extra=extra)
        return expect(Lease, self.ask(body, wait_s)[0], self._dialogue)

    def commit(self, step: int, priorities: dict[int, float]) -> Committed:
        """The batch is in the weights."""
        return expect(Committed, self.ask(Commit(step=step, incarnation=self.incarnation, priorities=priorities))[0], self._dialogue)

    def return_(self, step: int, damaged: Damaged = ()) -> None:
        """The batch is not."""
        expect(Done, self.ask(Return(step=step, incarnation=self.incarnation, damaged=tuple(damaged)))[0], self._dialogue)

    def checkpointed(self, oldest_step: int) -> None:
        """See :meth:`Consumer.checkpointed`."""
        expect(Done, self.ask(Checkpointed(oldest_step=oldest_step, incarnation=self.incarnation))[0], self._dialogue)

    def fetch(
        self, tickets: Sequence[int], reader: PayloadReader, metas: Mapping[int, GroupMeta]
    ) -> tuple[dict[int, TrajectoryGroup], list[tuple[int, int, str]]]:
        """Payloads of leased groups."""
        payloads, frames = self.payloads(tickets, reader)
        return reader.read(payloads, frames, metas)

    def payloads(self, tickets: Sequence[int], reader: PayloadReader) -> tuple[Payloads, list[Any]]:
        """What the broker says of payloads, and those that it hands out itself."""
        self._files = self._files and is_local(self._dialogue.endpoint)
        body, frames = self.ask(Fetch(tickets=tuple(tickets), files=self._files))
        payloads = expect(Payloads, body, self._dialogue)
        if reader.reaches(payloads):
            return payloads, frames
        log.info("files of the queue at %s cannot be read here: their payload comes through its socket", self._dialogue.endpoint)
        self._files = False
        return self.payloads(tickets, reader)

    def status(self) -> QueueStatus:
        """Counts of this shard."""
        return expect(Status, self.ask(StatusRequest())[0], self._dialogue).status


class Consumer:
    """The learner's client.

    Raises (each method):
        PeerTimeout: a broker did not answer. FencedError: a newer incarnation leases now.
        QueueError: the request does not fit the state of the queue. ProcessDied: no producer is left to wait for.

    Example:
        >>> with Consumer.connect(config, facts, "learner-0") as consumer:  # doctest: +SKIP
        ...     lease = consumer.lease(0, wait_s=1.0)
        ...     groups, damaged = consumer.fetch(lease.groups)
        ...     frontier = consumer.commit(0).frontier
    """

    def __init__(self, links: Sequence[ConsumerLink], shares: Sequence[int], reader: PayloadReader, max_uses: int = 1) -> None:
        self._max_uses = max_uses
        self._links = list(links)
        self._shares = list(shares)
        self._reader = reader
        self._step = -1
        self._leases: dict[int, Lease] = {}
        self._dead: dict[int, float] = {}
        self._trained: dict[int, set[int]] = {shard: set() for shard in range(len(links))}
        self._frontiers: dict[int, Frontier] = {shard: link.frontier for shard, link in enumerate(links)}

    @classmethod
    def connect(
        cls, config: Config, facts: RunFacts, name: str, timeout_s: float = START_TIMEOUT_S, restore: Frontier | None = None
    ) -> Self:
        """Connects to every shard and says hello; waits up to ``timeout_s`` for brokers that are still starting.

        Args:
            restore: frontier of the checkpoint that this learner starts from, if the queue may be ahead of it.

        Raises:
            PeerTimeout: nobody answered. FencedError: a newer incarnation has taken over.
        """
        links: list[ConsumerLink] = []
        number = len(facts.queue_endpoints)
        try:
            for shard in range(number):
                links.append(ConsumerLink.open(config, facts, name, shard, timeout_s, restore))
        except AsyncRLError:
            for link in links:
                link.close()
            raise
        shares = [share_of(config.algorithm.groups_per_step, shard, number) for shard in range(number)]
        queue = config.queue
        puller = Puller(facts.run_id, name, queue.dead_after_s, queue.max_message_mib << 20, keys=queue.keys)
        return cls(links, shares, PayloadReader(facts.run_id, puller), queue.max_uses)

    @classmethod
    def join(cls, run_dir: Path | str, name: str, timeout_s: float = START_TIMEOUT_S, restore: Frontier | None = None) -> Self:
        """Connects to the queue of a run directory, as ``asyncrl queue serve`` makes it; see :meth:`connect`."""
        return cls.connect(*run_of(run_dir, timeout_s), name, timeout_s, restore)

    def lease(self, step: int, wait_s: float) -> Lease:
        """The batch of training step ``step``; empty with ``blocked`` when it was not ready within ``wait_s``.

        Comes back early when a producer died, so that the caller can say who. ``ended``: no batch will come any more.
        Asking again gives the same batch until it is committed or returned.
        """
        self._reader.forget_gone()
        if step != self._step:
            self._step, self._leases = step, {}
        if not any(lease.groups for lease in self._leases.values()):  # or the batch would grow that was formed without it
            self._revive(step)
        blocked: list[str] = []
        extras = self._extras()
        for shard, link in enumerate(self._links):
            if shard in self._dead or shard in self._leases:
                continue
            try:
                lease = link.lease(step, wait_s / len(self._links), extras[shard])
            except PeerTimeout as error:
                self._mourn(shard, error)
                continue
            if lease.groups or lease.ended:
                self._leases[shard] = lease
            else:
                blocked.append(lease.blocked)
        return self._merged(step, blocked)

    def fetch(self, groups: Sequence[GroupMeta]) -> tuple[dict[int, TrajectoryGroup], list[tuple[int, int, str]]]:
        """Payloads of leased groups by ticket, and (ticket, attempt, reason) of those that cannot be used, for :meth:`return_`.

        Tokens are views of memory that is written again some time after the group was committed or returned.
        """
        found: dict[int, TrajectoryGroup] = {}
        damaged: list[tuple[int, int, str]] = []
        for shard, link in enumerate(self._links):
            mine = {meta.ticket: meta for meta in groups if meta.ticket % len(self._links) == shard}
            for tickets in _portions(mine, link.max_message_bytes):
                good, bad = link.fetch(tickets, self._reader, mine)
                found.update(good)
                damaged.extend(bad)
        return found, damaged

    def commit(self, step: int, priorities: Mapping[int, float] | None = None) -> Committed:
        """Training step ``step`` is in the weights; asking again gives the same answer.

        Args:
            priorities: new ones of leased tickets, for ``queue.order=prioritised``.
        """
        for shard, lease in self._leases.items():
            if lease.groups:
                self._trained[shard].add(step)
        answers: dict[int, Committed] = {}
        for shard, link in enumerate(self._links):
            if shard in self._dead:
                continue
            mine = {ticket: value for ticket, value in (priorities or {}).items() if ticket % len(self._links) == shard}
            try:
                answers[shard] = link.commit(step, mine)
            except PeerTimeout as error:
                self._note_trained(shard)
                self._mourn(shard, error)
                continue
            self._frontiers[shard] = answers[shard].frontier
            self._trained[shard].discard(step)
        self._leases = {}
        self._reader.forget_gone()
        frontier = merge_frontiers([self._frontiers[shard] for shard in range(len(self._links))])
        return Committed(frontier=frontier, status=merged_status([answer.status for answer in answers.values()]))

    def return_(self, step: int, damaged: Damaged = ()) -> None:
        """Gives the lease of ``step`` back untrained; without such a lease nothing happens. ``damaged`` groups are sampled again."""
        for shard, link in enumerate(self._links):
            if shard in self._dead:
                continue
            try:
                link.return_(step, [entry for entry in damaged if entry[0] % len(self._links) == shard])
            except PeerTimeout as error:
                self._mourn(shard, error)
        self._leases = {}

    def checkpointed(self, oldest_step: int) -> None:
        """No checkpoint older than ``oldest_step`` will be restored: payload kept for it can go."""
        for shard, link in enumerate(self._links):
            if shard not in self._dead:
                link.checkpointed(oldest_step)
        self._reader.forget_gone()

    def status(self) -> QueueStatus:
        """Counts of the moment, all living shards together."""
        return merged_status([link.status() for shard, link in enumerate(self._links) if shard not in self._dead])

    def close(self) -> None:
        """Closes the sockets at once; every request has had its answer."""
        for link in self._links:
            link.close()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _extras(self) -> dict[int, int]:
        """What each living shard may give beyond its share, together as much as the dead ones owe."""
        missing, living = sum(self._shares[shard] for shard in self._dead), [s for s in range(len(self._links)) if s not in self._dead]
        return {shard: missing // len(living) + (number < missing % len(living)) for number, shard in enumerate(living)}

    def _merged(self, step: int, blocked: list[str]) -> Lease:
        if blocked or not self._leases:
            return Lease(step=step, groups=(), blocked="; ".join(dict.fromkeys(blocked)))
        groups = sorted((meta for lease in self._leases.values() for meta in lease.groups), key=lambda meta: meta.ticket)
        if len(self._links) == 1:
            return self._leases[0]
        ended = not groups and all(lease.ended for lease in self._leases.values())
        return Lease(step=step, groups=tuple(groups), ended=ended)

    def _note_trained(self, shard: int) -> None:
        """Its last batch is in the weights, whether it knows or not: a checkpoint must not have it trained again."""
        lease, known = self._leases.get(shard), self._frontiers[shard]
        if lease is not None and self._max_uses == 1:
            tickets = tuple(sorted(meta.ticket for meta in lease.groups))
            above = (*known.settled_above, *tickets)
            self._frontiers[shard] = msgspec.structs.replace(known, settled_above=above, trained=known.trained + len(tickets))

    def _mourn(self, shard: int, error: PeerTimeout) -> None:
        """One broker does not answer: the others go on without it. Raises when it is the only one left."""
        if len(self._dead) + 1 == len(self._links):
            raise error
        log.warning("goes on without shard %d: %s", shard, error)
        self._dead[shard] = time.monotonic()
        self._leases.pop(shard, None)

    def _revive(self, step: int) -> None:
        """Brings shards that came back up to ``step``."""
        for shard in list(self._dead):
            link = self._links[shard]
            try:
                link.hello(PROBE_S, again=True)
            except PeerTimeout:
                continue
            self._frontiers[shard] = link.frontier
            for missed in range(link.frontier.steps, step):
                if missed not in self._trained[shard]:
                    link.return_(missed)
                self._frontiers[shard] = link.commit(missed, {}).frontier
                self._trained[shard].discard(missed)
            log.info("shard %d is back at step %d after %.1f s", shard, step, time.monotonic() - self._dead.pop(shard))


def _portions(metas: Mapping[int, GroupMeta], max_bytes: int) -> list[list[int]]:
    """Tickets in fetches whose payload stays within ``max_bytes``: a consumer asks for no more than it can hold."""
    portions: list[list[int]] = []
    room = 0
    for ticket, meta in metas.items():
        if not portions or meta.payload_bytes > room:
            portions.append([])
            room = max_bytes
        portions[-1].append(ticket)
        room -= meta.payload_bytes
    return portions
