"""Clients of the queue: :class:`Producer` (asyncio), :class:`Consumer` and :class:`Observer` (blocking); each speaks to every shard.

Each request waits for its broker alone, no longer than ``queue.dead_after_s`` beyond the ``wait_s`` that it asks for itself, and
then raises PeerTimeout. A broker that was started again within that time is greeted again, and nothing is lost or done twice.

Source: design note, section 4.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from asyncrl.config import Config
from asyncrl.config.run_dir import RunFacts
from asyncrl.errors import AsyncRLError, PeerTimeout, QueueError, VersionError
from asyncrl.queue.arena import Arena
from asyncrl.queue.beats import Beats
from asyncrl.queue.connection import START_TIMEOUT_S, run_of
from asyncrl.queue.consumer import Consumer
from asyncrl.queue.direct import Shelf
from asyncrl.queue.messages import Done, Fail, Heartbeat, Outcomes, ProducerGone, Put, PutItem, QueueStatus, Role, Stop, Ticket, Tickets
from asyncrl.queue.observing import ObserverLink, merged_status
from asyncrl.queue.payload import checksum, frame_lengths
from asyncrl.queue.producer import ProducerLink
from asyncrl.queue.wire import worth_saying
from asyncrl.trajectory import GroupMeta, TrajectoryGroup, encode_group_frames

__all__ = ["Consumer", "Observer", "Producer"]

log = logging.getLogger(__name__)
HELD_PAUSE_S = 0.5
SETTLED_PAUSE_S = 0.2
SAY_EVERY_S = 10.0
PUT_BYTES = 64 << 20
BEATS_IN_DEAD_AFTER = 3


class Producer:
    """A generator's client. Calls may overlap: a put or a heartbeat does not wait behind a ticket request.

    Send a heartbeat right after each committed weight update: a ticket request that waits is looked at again with the new version.

    Raises (each method):
        PeerTimeout: a broker did not answer. QueueError: a message over the size limit, refused before it is sent.
        VersionError: a version lower than this producer said before, or above the learner's step.
        FencedError: the broker belongs to a newer start of the run.

    Example:
        >>> producer = await Producer.connect(config, facts, "generator-0")  # doctest: +SKIP
        >>> tickets = await producer.tickets(version=0, n=4, wait_s=1.0)     # doctest: +SKIP
        >>> await producer.put([group])                                      # doctest: +SKIP
        ['accepted']
    """

    def __init__(self, links: Sequence[ProducerLink], arena: Arena | Shelf | None, dead_after_s: float) -> None:
        self._links = list(links)
        self._arena = arena
        if arena is not None:
            for link in self._links:
                link.on_released = arena.recycle  # not of self: an unclosed producer in a cycle of its own would block the collector
        self._beats = Beats(self._links, dead_after_s / BEATS_IN_DEAD_AFTER)
        self._next = self._inline = 0

    @classmethod
    async def connect(cls, config: Config, facts: RunFacts, name: str, timeout_s: float = START_TIMEOUT_S) -> Producer:
        """Connects and says hello; waits up to ``timeout_s`` for brokers that are still starting."""
        links: list[ProducerLink] = []
        try:
            for shard in range(len(facts.queue_endpoints)):
                links.append(await ProducerLink.open(config, facts, name, shard, timeout_s))
            return cls(links, _new_arena(config, facts, name), config.queue.dead_after_s)
        except AsyncRLError:
            for link in links:
                await link.close()
            raise

    @classmethod
    async def join(cls, run_dir: Path | str, name: str, timeout_s: float = START_TIMEOUT_S) -> Producer:
        """Connects to the queue of a run directory, as ``asyncrl queue serve`` makes it; waits for both up to ``timeout_s``.

        Raises:
            DataError: it is no run directory.
        """
        config, facts = await asyncio.to_thread(run_of, run_dir, timeout_s)
        return await cls.connect(config, facts, name, timeout_s)

    async def tickets(self, version: int, n: int, wait_s: float) -> Tickets:
        """Up to ``n`` tickets for the committed ``version``; none with ``blocked`` when the gate stayed shut for ``wait_s``.

        Shards are asked in turn for what they give right away, then, when none has a ticket, each for its part of ``wait_s``. No request
        is given up, so that no shard grants what nobody takes. A shard that was silent is left out until it answers a heartbeat.
        """
        self._check_version(version)
        if len(self._links) == 1:
            return await self._links[0].tickets(version, n, wait_s)
        self._next = (self._next + 1) % len(self._links)
        answers = await self._in_turn(version, n, 0.0)
        if not _all_tickets(answers) and not all(answer.stopping for answer in answers):
            answers = await self._in_turn(version, n, wait_s) or answers
        if not answers:
            raise PeerTimeout(f"none of {len(self._links)} brokers of the queue answers")
        found = _all_tickets(answers)
        return Tickets(
            tickets=found,
            blocked="" if found else "; ".join(dict.fromkeys(answer.blocked for answer in answers if answer.blocked)),
            stopping=all(answer.stopping for answer in answers),
        )

    async def put(self, groups: Sequence[TrajectoryGroup]) -> list[str]:
        """Hands finished groups over; one outcome each: accepted, duplicate, late, no_signal, stale or ``refused: REASON``.

        While the queue cannot keep them, as on a full disk, it waits and puts them again.
        """
        outcomes: dict[int, str] = {}
        for link_number, link in enumerate(self._links):
            mine = [group for group in groups if group.ticket % len(self._links) == link_number]
            for batch in self._batches([self._item(group, link) for group in mine]):
                for item, outcome in zip(batch, await self._put(link, batch), strict=True):
                    outcomes[item[0].meta.ticket] = outcome
        return [outcomes[group.ticket] for group in groups]

    async def fail(self, ticket: int, attempt: int, reason: str, final: bool = False) -> None:
        """The ticket could not be finished; ``final`` drops it as unusable instead of issuing it again."""
        await self._links[ticket % len(self._links)].ask(Done, Fail(ticket=ticket, attempt=attempt, reason=reason, final=final))

    async def heartbeat(self, version: int, in_flight: dict[int, int], sampled_tokens: int) -> None:
        """Alive: the committed version, tokens in flight by version, tokens sampled so far by this process.

        All shards are told at once. While another one answers, a silent one is waited for in the background, and raises nothing.
        """
        self._check_version(version)
        # tokens are counted by the first shard alone, or their sum would count them once a shard
        first = Heartbeat(version=version, in_flight=in_flight, sampled_tokens=sampled_tokens)
        other = Heartbeat(version=version, in_flight={}, sampled_tokens=0)
        await self._beats.round([other if number else first for number in range(len(self._links))])

    def _check_version(self, version: int) -> None:
        known = max(link.acknowledged for link in self._links)
        if version < known:
            raise VersionError(f"a version never falls; {self._links[0].name} said {known}, now {version}: load the current weights")

    async def close(self) -> None:
        """Closes the sockets; requests still waiting fail with PeerTimeout.

        In shared memory payload of groups that aren't settled stays. With ``queue.payload=direct`` it goes, and they are sampled again:
        wait for :meth:`settled` before.
        """
        await self._beats.close()
        for link in self._links:
            await link.close()
        if self._arena is not None:
            self._arena.close(unlink=False)

    async def settled(self, stall_s: float) -> None:
        """Waits until this process need not live on for payload that stays with it (``queue.payload=direct``); heartbeats must go on.

        Raises:
            PeerTimeout: no group was settled for ``stall_s``.
        """
        shelf = self._arena if isinstance(self._arena, Shelf) else None
        left, changed_s = 0, time.monotonic()
        said_s = changed_s - SAY_EVERY_S
        while shelf is not None and shelf.num_used:
            now_s = time.monotonic()
            if shelf.num_used != left:
                left, changed_s = shelf.num_used, now_s
            if now_s - changed_s > stall_s:
                raise PeerTimeout(f"the learner commits or returns groups; {left} kept at {shelf.source} waited {stall_s:g} s for that")
            if now_s - said_s >= SAY_EVERY_S:
                said_s = now_s
                log.info("waiting for the learner: %d groups are kept at %s until they are settled", left, shelf.source)
            await asyncio.sleep(SETTLED_PAUSE_S)

    def _item(self, group: TrajectoryGroup, link: ProducerLink) -> tuple[PutItem, list[Any]]:
        frames = encode_group_frames(group)
        return self._prepared(group.meta(payload_bytes=sum(frame_lengths(frames))), frames, link)

    def _prepared(self, meta: GroupMeta, frames: Sequence[Any], link: ProducerLink) -> tuple[PutItem, list[Any]]:
        """What is sent for an encoded group."""
        if self._arena is not None:
            try:
                segment = self._arena.write(frames)
                lengths = (segment.length,)
                return PutItem(meta=meta, checksum=segment.checksum, lengths=lengths, segment=segment.name, source=self._arena.source), []
            except QueueError as error:  # no room in shared memory, or on the shelf
                self._inline += 1
                if worth_saying(self._inline):
                    log.warning("goes through the broker's socket (%d groups so far): %s", self._inline, error)
        link.check_size(meta.payload_bytes)  # the log hands it out as one frame
        return PutItem(meta=meta, checksum=checksum(frames), lengths=frame_lengths(frames)), list(frames)

    def _batches(self, items: list[tuple[PutItem, list[Any]]]) -> list[list[tuple[PutItem, list[Any]]]]:
        """Items in messages of up to ``PUT_BYTES`` inline."""
        batches: list[list[tuple[PutItem, list[Any]]]] = []
        room = 0
        for item in items:
            size = 0 if item[0].segment else item[0].meta.payload_bytes
            if not batches or size > room:
                batches.append([])
                room = PUT_BYTES
            batches[-1].append(item)
            room -= size
        return batches

    async def _put(self, link: ProducerLink, batch: list[tuple[PutItem, list[Any]]]) -> list[str]:
        said = False
        while True:
            frames = [frame for _, own in batch for frame in own]
            answer = await link.ask(Outcomes, Put(groups=tuple(item for item, _ in batch)), frames)
            held = next((outcome for outcome in answer.outcomes if outcome.startswith("held: ")), "")
            if not held:
                return list(answer.outcomes)
            if not said:
                log.warning("%d groups wait here: %s", len(batch), held)
                said = True
            await asyncio.sleep(HELD_PAUSE_S)

    async def _in_turn(self, version: int, n: int, wait_s: float) -> list[Tickets]:
        """Answers of the shards, asked in turn: for a part each up to ``n``, or for a part of ``wait_s`` each up to the first ticket."""
        answers: list[Tickets] = []
        turn = [(self._next + number) % len(self._links) for number in range(len(self._links))]
        turn = [number for number in turn if not self._beats.silent(number)] or turn
        left, part = n, n if wait_s else -(-n // len(turn))
        for number in turn:
            answer = await self._ask_tickets(number, version, min(part, left), wait_s / len(turn))
            if answer is None:
                continue
            answers.append(answer)
            left -= len(answer.tickets)
            if left <= 0 or (wait_s and answer.tickets):
                break
        return answers

    async def _ask_tickets(self, number: int, version: int, n: int, wait_s: float) -> Tickets | None:
        try:
            return await self._links[number].tickets(version, n, wait_s)
        except PeerTimeout as error:
            self._beats.missed(number, error)
            return None


def _new_arena(config: Config, facts: RunFacts, name: str) -> Arena | Shelf | None:
    """Where a producer lays its payload, by ``queue.payload``."""
    limit_bytes = config.queue.max_queued_mib << 20
    match config.queue.payload:
        case "shm":
            return Arena(facts.run_id, name, limit_bytes)
        case "direct":
            max_frame_bytes = config.queue.max_message_mib << 20
            return Shelf(facts.run_id, name, facts.queue_endpoints[0], limit_bytes, max_frame_bytes=max_frame_bytes, keys=config.queue.keys)
        case _:
            return None


def _all_tickets(answers: Sequence[Tickets]) -> tuple[Ticket, ...]:
    return tuple(ticket for answer in answers for ticket in answer.tickets)


class Observer:
    """The driver's client: counts, deaths seen by the supervisor, stop.

    Example:
        >>> with Observer.connect(config, facts, "driver") as observer:  # doctest: +SKIP
        ...     observer.status().admitted
    """

    role = Role.OBSERVER

    def __init__(self, links: Sequence[ObserverLink]) -> None:
        self._links = list(links)

    @classmethod
    def connect(cls, config: Config, facts: RunFacts, name: str, timeout_s: float = START_TIMEOUT_S, answer_s: float | None = None) -> Self:
        """Connects to every shard and says hello; waits up to ``timeout_s`` for brokers that are still starting.

        Args:
            answer_s: how long each answer is waited for; ``queue.dead_after_s`` if not given.
        """
        links: list[ObserverLink] = []
        try:
            for shard in range(len(facts.queue_endpoints)):
                links.append(ObserverLink.open(config, facts, name, shard, timeout_s, answer_s=answer_s))
        except AsyncRLError:
            for link in links:
                link.close()
            raise
        return cls(links)

    @classmethod
    def join(cls, run_dir: Path | str, name: str, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Connects to the queue of a run directory, as ``asyncrl queue serve`` makes it; waits for both up to ``timeout_s``.

        Raises:
            DataError: it is no run directory.
        """
        return cls.connect(*run_of(run_dir, timeout_s), name, timeout_s)

    def status(self) -> QueueStatus:
        """Counts of the moment, all shards together."""
        return merged_status([link.status() for link in self._links])

    def producer_gone(self, name: str) -> None:
        """The supervisor saw producer ``name`` die: its tickets are issued again at once."""
        self._tell_all(ProducerGone(name=name))

    def stop(self, exit: bool = False) -> None:
        """No more tickets; with ``exit`` the brokers answer and end."""
        self._tell_all(Stop(exit=exit))

    def _tell_all(self, body: ProducerGone | Stop) -> None:
        """Says it to every broker, whichever of them is silent; then raises the last PeerTimeout."""
        silent: PeerTimeout | None = None
        for link in self._links:
            try:
                link.tell(body)
            except PeerTimeout as error:
                silent = error
        if silent is not None:
            raise silent

    def close(self) -> None:
        """Closes the sockets at once; every request has had its answer."""
        for link in self._links:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
