"""Clients of several shards over stand-in links: what they ask of whom."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import PeerTimeout, VersionError
from asyncrl.queue.arena import Arena
from asyncrl.queue.client import Observer, Producer
from asyncrl.queue.direct import Shelf
from asyncrl.queue.messages import Done, ProducerGone, Stop, Ticket, Tickets


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


def test_a_producer_that_nobody_closed_needs_no_collector() -> None:
    async def scene() -> None:
        shards: list[Any] = [Shard() for _ in range(2)]
        producer = Producer(shards, Arena("r", "generator-0", 1 << 20), 9.0)
        await producer.tickets(0, 1, 0.1)
        gone = weakref.ref(producer)
        gc.disable()
        try:
            del producer
            assert gone() is None  # a socket and its context that are collected in the wrong order wait for each other
        finally:
            gc.enable()

    asyncio.run(scene())


def test_payload_that_nobody_settles_is_waited_for_no_longer_than_asked_for(tmp_path: Path) -> None:
    async def scene() -> None:
        shards: list[Any] = [Shard()]
        shelf = Shelf("r", "generator-0", f"ipc://{tmp_path}/q", 1 << 20)
        producer = Producer(shards, shelf, 9.0)
        await producer.settled(0.1)  # nothing is kept
        kept = shelf.write([b"abc"])
        with pytest.raises(PeerTimeout, match=r"1 kept at ipc://.* waited 0\.3 s"):
            await asyncio.wait_for(producer.settled(0.3), 5.0)
        waiting = asyncio.create_task(producer.settled(30.0))
        await asyncio.sleep(0)
        shards[0].on_released([kept.name])
        await asyncio.wait_for(waiting, 5.0)
        await producer.close()

    asyncio.run(scene())


def test_what_shards_grant_at_a_commit_reaches_the_caller() -> None:
    async def scene() -> None:
        shards: list[Any] = [Shard(is_open=False) for _ in range(3)]
        producer = Producer(shards, None, 9.0)
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
            producer = Producer(shards, None, 9.0)
            assert len((await producer.tickets(0, n, 0.1)).tickets) == n == sum(shard.granted for shard in shards)
            await producer.close()

    asyncio.run(scene())


class Heart:
    """A link to a broker that answers beats, or after ``answer_s`` without an answer says so, as a hung one."""

    acknowledged = -1
    name = "generator-0"

    def __init__(self, *, hung: bool = False, answer_s: float = 0.3) -> None:
        self.awake = asyncio.Event()
        if not hung:
            self.awake.set()
        self.answer_s = answer_s
        self.beats: list[tuple[float, int]] = []
        self.ticket_requests = 0

    async def ask(self, kind: Any, body: Any) -> Done:
        await self._answer()
        self.beats.append((asyncio.get_running_loop().time(), body.version))
        return Done()

    async def tickets(self, version: int, n: int, wait_s: float) -> Tickets:
        self.ticket_requests += 1
        await self._answer()
        return Tickets(tickets=(_ticket(),))

    async def close(self) -> None:
        return None

    async def _answer(self) -> None:
        try:
            await asyncio.wait_for(self.awake.wait(), self.answer_s)
        except TimeoutError as error:
            raise PeerTimeout("no answer") from error


async def beat_for(producer: Producer, seconds: float, every_s: float = 0.02) -> None:
    """As a generator does: a heartbeat, a pause."""
    until_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until_s:
        await producer.heartbeat(0, {}, 0)
        await asyncio.sleep(every_s)


def test_a_hung_shard_lets_no_other_wait_for_a_beat_as_long_as_it_takes_producers_for_dead() -> None:
    async def scene() -> None:
        dead_after_s = 0.6
        hearts: list[Any] = [Heart(hung=True, answer_s=dead_after_s), Heart()]
        producer = Producer(hearts, None, dead_after_s)
        started_s = asyncio.get_running_loop().time()
        await beat_for(producer, 1.5)
        times = [started_s, *(at_s for at_s, _ in hearts[1].beats)]
        assert max(later - earlier for earlier, later in itertools.pairwise(times)) < dead_after_s * 2 / 3
        assert len(times) > 20, "only the first round waits for the shard that hangs"
        await producer.close()

    asyncio.run(scene())


def test_a_shard_that_was_late_hears_the_newest_version_as_soon_as_it_answers() -> None:
    async def scene() -> None:
        hearts: list[Any] = [Heart(hung=True, answer_s=9.0), Heart()]
        producer = Producer(hearts, None, 0.1)
        for version in (0, 1, 2):
            await producer.heartbeat(version, {}, 0)
        hearts[0].awake.set()
        await asyncio.sleep(0.05)
        assert [version for _, version in hearts[0].beats] == [0, 2]
        await producer.close()

    asyncio.run(scene())


def test_a_silent_shard_is_asked_for_tickets_again_once_it_answers_a_beat() -> None:
    async def scene() -> None:
        hearts: list[Any] = [Heart(hung=True), Heart()]
        producer = Producer(hearts, None, 0.1)
        await producer.heartbeat(0, {}, 0)
        for _ in range(4):
            assert len((await producer.tickets(0, 2, 0.1)).tickets) == 1
        assert hearts[0].ticket_requests == 0
        hearts[0].awake.set()
        await producer.heartbeat(0, {}, 0)
        await asyncio.sleep(0)
        assert len((await producer.tickets(0, 2, 0.1)).tickets) == 2
        await producer.close()

    asyncio.run(scene())


def test_a_shard_that_left_a_ticket_request_without_an_answer_is_left_out() -> None:
    async def scene() -> None:
        hearts: list[Any] = [Heart(hung=True, answer_s=0.05), Heart()]
        producer = Producer(hearts, None, 9.0)
        for _ in range(4):
            assert len((await producer.tickets(0, 2, 0.1)).tickets) == 1
        assert hearts[0].ticket_requests == 1
        await producer.close()

    asyncio.run(scene())


@pytest.mark.parametrize("shards", [1, 3])
def test_only_when_all_shards_are_silent_a_heartbeat_says_so(shards: int) -> None:
    async def scene() -> None:
        hearts: list[Any] = [Heart(hung=True) for _ in range(shards)]
        producer = Producer(hearts, None, 0.3)
        for _ in range(2):
            with pytest.raises(PeerTimeout):
                await producer.heartbeat(0, {}, 0)
        with pytest.raises(PeerTimeout):
            await producer.tickets(0, 1, 0.1)
        hearts[0].awake.set()
        await producer.heartbeat(0, {}, 0)
        assert len((await producer.tickets(0, 1, 0.1)).tickets) == 1
        await producer.close()

    asyncio.run(scene())


def test_a_beat_that_is_refused_raises_and_the_next_one_is_said_again() -> None:
    class Strict(Heart):
        async def ask(self, kind: Any, body: Any) -> Done:
            if body.version == 7:
                raise VersionError("7 steps are not committed")
            return await super().ask(kind, body)

    async def scene() -> None:
        hearts: list[Any] = [Strict(), Strict()]
        producer = Producer(hearts, None, 9.0)
        with pytest.raises(VersionError):
            await producer.heartbeat(7, {}, 0)
        await producer.heartbeat(1, {}, 0)
        assert [len(heart.beats) for heart in hearts] == [1, 1]
        await producer.close()

    asyncio.run(scene())


def test_beats_that_wait_end_with_their_producer() -> None:
    async def scene() -> None:
        hearts: list[Any] = [Heart(hung=True, answer_s=9.0), Heart()]
        producer = Producer(hearts, None, 0.1)
        await producer.heartbeat(0, {}, 0)
        await producer.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

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


def test_a_group_that_finds_no_room_goes_through_the_socket_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    class Link(Shard):
        def check_size(self, num_bytes: int) -> None:
            assert num_bytes == 5

    async def scene() -> None:
        link: Any = Link()
        producer = Producer([link], Arena("r", "generator-0", 4096), 9.0)
        meta: Any = SimpleNamespace(payload_bytes=5)
        item, frames = producer._prepared(meta, [b"x" * 5000], link)
        assert item.segment == "" and len(frames) == 1
        assert "goes through the broker's socket (1 groups so far): shared memory of this producer is limited to 4096 bytes" in caplog.text
        await producer.close()

    asyncio.run(scene())
