"""Clients of several shards over stand-in links: what they ask of whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.errors import PeerTimeout
from asyncrl.queue.client import Observer, Producer
from asyncrl.queue.messages import ProducerGone, Stop, Ticket, Tickets


class Shard:
    """A link to a broker that grants whatever it is asked for once it is open; it grants it to a caller that has gone, too."""

    acknowledged = -1

    def __init__(self, *, is_open: bool = True) -> None:
        self.open = asyncio.Event()
        if is_open:
            self.open.set()
        self.granted = 0
        self._brokers: set[asyncio.Task[Tickets]] = set()

    async def tickets(self, version: int, n: int, wait_s: float) -> Tickets:
        task = asyncio.create_task(self._grant(n, wait_s))
        self._brokers.add(task)
        return await asyncio.shield(task)

    async def close(self) -> None:
        await asyncio.gather(*self._brokers, return_exceptions=True)

    async def _grant(self, n: int, wait_s: float) -> Tickets:
        try:
            await asyncio.wait_for(self.open.wait(), wait_s)
        except TimeoutError:
            return Tickets(tickets=(), blocked="shut")
        self.granted += n
        return Tickets(tickets=tuple(_ticket() for _ in range(n)))


def _ticket() -> Ticket:
    fields: dict[str, Any] = {"ticket": 0, "attempt": 0, "group_id": "g", "prompt_id": "p", "prompt": "", "is_chat": False}
    return Ticket(**fields, answer="", extra="", seed=0, deadline_s=1.0, not_before_version=0)


def test_what_shards_grant_at_a_commit_reaches_the_caller() -> None:
    async def scene() -> None:
        shards: list[Any] = [Shard(is_open=False) for _ in range(3)]
        producer = Producer(shards, None)
        call = asyncio.create_task(producer.tickets(0, 4, 0.6))
        await asyncio.sleep(0.05)
        for shard in shards:
            shard.open.set()
        answer = await call
        await producer.close()
        assert len(answer.tickets) == 4 == sum(shard.granted for shard in shards)

    asyncio.run(scene())


def test_no_more_tickets_come_than_were_asked_for() -> None:
    async def scene() -> None:
        for n in (1, 2, 4, 5):
            shards: list[Any] = [Shard() for _ in range(3)]
            producer = Producer(shards, None)
            assert len((await producer.tickets(0, n, 0.1)).tickets) == n == sum(shard.granted for shard in shards)
            await producer.close()

    asyncio.run(scene())


class Ear:
    """A link of an observer; a deaf one never answers."""

    def __init__(self, *, deaf: bool) -> None:
        self.deaf = deaf
        self.heard: list[Any] = []

    def tell(self, body: Any) -> None:
        if self.deaf:
            raise PeerTimeout("no answer")
        self.heard.append(body)


def test_what_an_observer_says_reaches_the_shards_behind_a_silent_one() -> None:
    ears: list[Any] = [Ear(deaf=True), Ear(deaf=False)]
    observer = Observer(ears)
    with pytest.raises(PeerTimeout):
        observer.producer_gone("generator-0")
    with pytest.raises(PeerTimeout):
        observer.stop()
    assert ears[1].heard == [ProducerGone(name="generator-0"), Stop(exit=False)]
