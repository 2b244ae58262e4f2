"""Shared memory of producers that are gone: it goes with them, or with their last group; one that was merely slow goes on."""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_queue_service import CONSUMER, OBSERVER, PRODUCER, group_for, lease, new_service, say, tickets

from asyncrl.queue import messages as m
from asyncrl.queue.arena import Arena
from asyncrl.queue.service import QueueService
from asyncrl.queue.shm import Mappings, SegmentKeeper
from asyncrl.trajectory import encode_group

KIB = 1 << 10


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def service(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueueService]:
    service = new_service(tmp_path)
    use(service, shm)
    yield service
    service.close()


def use(service: QueueService, shm: Path) -> None:
    service._store._keeper, service._store._mappings = SegmentKeeper("r", folder=shm), Mappings("r", folder=shm)


def arena_in(shm: Path) -> Arena:
    return Arena("r", "generator-0", 1024 * KIB, folder=shm)


def put(service: QueueService, arena: Arena, ticket: m.Ticket) -> m.Outcomes:
    group = group_for(ticket)
    segment = arena.write([encode_group(group).to_pybytes()])
    item = m.PutItem(meta=group.meta(segment.length), checksum=segment.checksum, lengths=(segment.length,), segment=segment.name)
    answer: m.Outcomes = say(service, PRODUCER, m.Put(groups=(item,)))
    return answer


def train(service: QueueService, step: int) -> None:
    assert len(lease(service, step).groups) == 2
    say(service, CONSUMER, m.Commit(step=step, incarnation=0))


def gone(service: QueueService, how: str) -> None:
    if how == "told":
        say(service, OBSERVER, m.ProducerGone(name="generator-0"))
    else:
        assert service.expire(1000.0)


@pytest.mark.parametrize("how", ["told", "silent"])
def test_a_producers_segments_go_with_it_and_those_of_live_groups_once_these_are_settled(
    service: QueueService, shm: Path, how: str
) -> None:
    arena = arena_in(shm)
    free, unput = arena.write([b"free"]), arena.write([b"x"])
    arena.recycle([free.name])
    live = [put(service, arena, ticket) for ticket in tickets(service, 4)]
    assert [answer.outcomes for answer in live] == [("accepted",)] * 4
    other = Arena("r", "generator-00", KIB * 64, folder=shm).write([b"another producer"])
    assert len(os.listdir(shm)) == 6 and unput.name in os.listdir(shm)
    gone(service, how)
    assert len(os.listdir(shm)) == 5 and unput.name not in os.listdir(shm)
    train(service, 0)
    assert len(os.listdir(shm)) == 3
    train(service, 1)
    assert os.listdir(shm) == [other.name]


def test_a_broker_with_a_log_holds_no_memory_of_segments_that_it_removed(tmp_path: Path, shm: Path) -> None:
    service = new_service(tmp_path, durability="written")
    use(service, shm)
    arena = arena_in(shm)
    for ticket in tickets(service, 4):
        assert put(service, arena, ticket).outcomes == ("accepted",)
    train(service, 0)
    mappings = service._store._mappings
    assert len(mappings) == 4
    gone(service, "told")  # two were free, two are in live groups
    assert len(os.listdir(shm)) == 2 == len(mappings)
    train(service, 1)
    assert len(os.listdir(shm)) == 0 == len(mappings)
    service.close()


def test_a_producer_that_was_merely_slow_gives_up_what_was_removed_and_goes_on(service: QueueService, shm: Path) -> None:
    arena = arena_in(shm)
    written = [ticket for ticket in tickets(service, 5) if ticket.ticket != 3]
    free = arena.write([b"free"])
    arena.recycle([free.name])
    for ticket in written[:2]:
        put(service, arena, ticket)
    late = group_for(written[2])
    segment = arena.write([encode_group(late).to_pybytes()])
    gone(service, "silent")
    train(service, 0)
    assert os.listdir(shm) == []
    item = m.PutItem(meta=late.meta(segment.length), checksum=segment.checksum, lengths=(segment.length,), segment=segment.name)
    answer = say(service, PRODUCER, m.Put(groups=(item,)))
    assert answer.outcomes == ("late",) and len(answer.released) == 3
    arena.recycle(answer.released)
    assert arena.num_used == 0
    for ticket in tickets(service, 2):
        assert put(service, arena, ticket).outcomes == ("accepted",)
    assert len(os.listdir(shm)) == 2 == arena.num_used
    assert arena.num_bytes == 2 * -(-segment.length // mmap.PAGESIZE) * mmap.PAGESIZE
    train(service, 1)
    done = say(service, PRODUCER, m.Heartbeat(version=0, in_flight={}, sampled_tokens=0))
    assert len(done.released) == 2 and len(os.listdir(shm)) == 2, "they go back to it, as ever"


def test_a_put_whose_segment_was_removed_is_refused_and_the_segment_given_back(service: QueueService, shm: Path) -> None:
    arena = arena_in(shm)
    (ticket,) = tickets(service, 1)
    os.unlink(shm / arena.write([b"x"]).name)
    segment = arena.write([b"y" * 64])
    os.unlink(shm / segment.name)
    item = m.PutItem(meta=group_for(ticket).meta(64), checksum=1, lengths=(64,), segment=segment.name)
    answer = say(service, PRODUCER, m.Put(groups=(item,)))
    assert answer.outcomes[0].startswith("refused: ") and answer.released == (segment.name,)
    (again,) = tickets(service, 1)
    assert (again.ticket, again.attempt) == (0, 1)


def test_a_new_process_of_the_name_is_told_of_no_segment_that_it_may_have_made_itself(service: QueueService, shm: Path) -> None:
    arena = arena_in(shm)
    for ticket in tickets(service, 4):
        put(service, arena, ticket)
    gone(service, "told")
    train(service, 0)
    service.greet("generator-0", m.Hello(role=m.Role.PRODUCER), 0.0)
    assert len(os.listdir(shm)) == 2
    later = arena_in(shm)
    (ticket,) = tickets(service, 1)
    assert put(service, later, ticket).released == ()
    train(service, 1)
    done = say(service, PRODUCER, m.Heartbeat(version=0, in_flight={}, sampled_tokens=0))
    assert len(done.released) == 2
    later.recycle(done.released)
    assert later.num_used == 1 == len(os.listdir(shm)), "its predecessor's are removed, its own stays"


def test_what_a_process_left_is_removed_when_its_name_comes_back(service: QueueService, shm: Path) -> None:
    arena_in(shm).write([b"x"])
    service.greet("generator-0", m.Hello(role=m.Role.PRODUCER, again=True), 0.0)
    assert len(os.listdir(shm)) == 1, "the same process speaks on"
    service.greet("generator-0", m.Hello(role=m.Role.PRODUCER), 0.0)
    assert os.listdir(shm) == []


def test_one_of_several_shards_removes_only_what_it_knows_to_be_settled(service: QueueService, shm: Path) -> None:
    service.gate.settings = dataclasses.replace(service.gate.settings, shards=2)
    arena = arena_in(shm)
    elsewhere = arena.write([b"a live group of the other shard"])
    for ticket in tickets(service, 2):
        put(service, arena, ticket)
    gone(service, "told")
    assert len(os.listdir(shm)) == 3
    train(service, 0)
    assert os.listdir(shm) == [elsewhere.name]


def test_who_was_dead_when_the_broker_started_is_gone_for_it_too(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    first = new_service(tmp_path, durability="written")
    say(first, OBSERVER, m.ProducerGone(name="generator-0"))
    first.commit()
    first.close()
    monkeypatch.setattr("asyncrl.queue.store.PayloadStore.owner_gone", lambda store, owner, alone: said.append((owner, alone)))
    new_service(tmp_path, durability="written").close()
    assert said[0] == ("generator-0", True)


@pytest.mark.parametrize("how", ["told", "silent"])
def test_a_name_that_no_segment_of_this_run_has_is_not_released_and_troubles_nobody_at_a_death(service: QueueService, how: str) -> None:
    (ticket,) = tickets(service, 1)
    say(service, PRODUCER, m.Fail(ticket=ticket.ticket, attempt=ticket.attempt, reason="hiccup"))
    late = group_for(ticket)
    for name in ("asyncrl-other.q.generator-0.7", "/etc/x.q.generator-0.7"):
        item = m.PutItem(meta=late.meta(5), checksum=1, lengths=(5,), segment=name)
        assert say(service, PRODUCER, m.Put(groups=(item,))).released == ()
    gone(service, how)
