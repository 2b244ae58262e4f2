"""Requests answered without a socket: roles, waiting, payload, dead letters."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import DataError, DiskFull, FencedError, QueueError, SchemaError, UnknownSession
from asyncrl.queue import messages as m
from asyncrl.queue.arena import Arena
from asyncrl.queue.opening import open_queue
from asyncrl.queue.payload import checksum
from asyncrl.queue.payload_reader import PayloadReader
from asyncrl.queue.prompts import TicketPrompts, ticket_seed
from asyncrl.queue.service import Call, QueueService
from asyncrl.queue.sessions import Session
from asyncrl.queue.settings import GateSettings
from asyncrl.queue.shm import SHM_FOLDER, SegmentKeeper
from asyncrl.tasks.prompt import Prompt
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan, encode_group

PRODUCER = Session("generator-0", b"p", m.Hello(role=m.Role.PRODUCER), 0)
CONSUMER = Session("learner-0", b"c", m.Hello(role=m.Role.CONSUMER), 0)
OBSERVER = Session("driver", b"o", m.Hello(role=m.Role.OBSERVER), 0)


class Numbers:
    """Prompts that are their own index; index 3 cannot be read."""

    size = None

    def prompt(self, index: int) -> Prompt:
        if index == 3:
            raise DataError("row 3: field prompt is missing")
        return Prompt(prompt_id=f"p{index}", prompt=f"{index}>", answer=str(index))


def opened(path: Path, config: Config, incarnation: int = 0, frontier: m.Frontier | None = None) -> QueueService:
    facts = RunFacts(
        run_id="r",
        incarnation=incarnation,
        queue_endpoints=(),
        sync_endpoint="",
        rendezvous="",
        model_dir="",
        generator_device="cpu",
        learner_device="cpu",
    )
    run_dir = RunDir(path)
    queue = open_queue(run_dir, config, facts, GateSettings.from_config(config, None), frontier)
    return QueueService(queue, TicketPrompts(Numbers(), 5, 30.0), run_dir, incarnation)


def new_service(path: Path, incarnation: int = 0, frontier: m.Frontier | None = None, **queue: Any) -> QueueService:
    config = Config.model_validate({"algorithm": {"groups_per_step": 2}, "queue": {"max_staleness": 2, "durability": "memory", **queue}})
    service = opened(path, config, incarnation, frontier)
    for session in (PRODUCER, CONSUMER, OBSERVER):
        service.greet(session.sender, m.Hello(role=session.role, incarnation=incarnation), 0.0)
    return service


def group_for(ticket: m.Ticket, **changes: Any) -> TrajectoryGroup:
    fields: dict[str, Any] = {
        "group_id": ticket.group_id,
        "ticket": ticket.ticket,
        "attempt": ticket.attempt,
        "sample": 0,
        "prompt_id": ticket.prompt_id,
        "seed": ticket.seed,
        "incarnation": 0,
        "input_ids": [5, 6, 7],
        "loss_mask": [False, False, True],
        "behavior_logprobs": [0.0, 0.0, -0.25],
        "version_spans": [VersionSpan(2, 0)],
        "finish_reason": "stop",
        "temperature": 1.0,
        "generator": "generator-0",
        "engine": "fake",
        "dispatched_s": 0.0,
        "finished_s": 1.0,
        **changes,
    }
    rows = [Trajectory.checked(**fields, sibling=i, reward=float(i)) for i in range(2)]
    return TrajectoryGroup(trajectories=tuple(rows))


def say(service: QueueService, session: Session, body: m.RequestBody, *payloads: bytes, call: Call = Call.ONLY, now_s: float = 0.0) -> Any:
    answer = service.answer(session, body, payloads, now_s, call)
    return None if answer is None else answer[0]


def tickets(service: QueueService, number: int) -> list[m.Ticket]:
    return list(say(service, PRODUCER, m.TicketRequest(version=0, max_tickets=number, wait_s=0.0)).tickets)


def put(service: QueueService, ticket: m.Ticket, group: TrajectoryGroup, **changes: Any) -> str:
    payload = encode_group(group).to_pybytes()
    item = m.PutItem(meta=group.meta(len(payload)), checksum=checksum([payload]), lengths=(len(payload),))
    item = msgspec.structs.replace(item, **changes)
    (outcome,) = say(service, PRODUCER, m.Put(groups=(item,)), payload).outcomes
    return outcome


def read(service: QueueService, metas: Any) -> tuple[list[int], list[tuple[int, int, str]]]:
    answer = service.answer(CONSUMER, m.Fetch(tickets=tuple(meta.ticket for meta in metas)), (), 0.0, Call.ONLY)
    assert answer is not None
    groups, damaged = PayloadReader("r").read(answer[0], answer[1], {meta.ticket: meta for meta in metas})
    return list(groups), damaged


def put_direct(service: QueueService, ticket: m.Ticket, number: int, **changes: Any) -> str:
    group = group_for(ticket)
    item = m.PutItem(meta=group.meta(9), checksum=1, lengths=(9,), segment=f"asyncrl-r.q.generator-0.{number}", source="ipc:///nowhere")
    (outcome,) = say(service, PRODUCER, m.Put(groups=(msgspec.structs.replace(item, **changes),))).outcomes
    return outcome


def test_payload_that_stays_with_its_producer_is_named_to_the_consumer_and_released_after_the_commit(tmp_path: Path) -> None:
    service = new_service(tmp_path, payload="direct")
    given = tickets(service, 2)
    assert [put_direct(service, ticket, number) for number, ticket in enumerate(given)] == ["accepted"] * 2
    lease = say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=0.0))
    fetched = say(service, CONSUMER, m.Fetch(tickets=(0, 1), files=True))
    assert [(item.segment, item.source, item.num_frames) for item in fetched.groups] == [
        (f"asyncrl-r.q.generator-0.{number}", "ipc:///nowhere", 0) for number in range(2)
    ]
    assert len(lease.groups) == 2
    say(service, CONSUMER, m.Commit(step=0, incarnation=0))
    beat = say(service, PRODUCER, m.Heartbeat(version=0, in_flight={}, sampled_tokens=0))
    assert sorted(beat.released) == [item.segment for item in fetched.groups]


@pytest.mark.parametrize("death", ["told", "silent", "new life"])
def test_groups_that_wait_die_with_their_producer_and_are_sampled_again(tmp_path: Path, death: str) -> None:
    service = new_service(tmp_path, payload="direct")
    for number, ticket in enumerate(tickets(service, 3)):
        put_direct(service, ticket, number)
    say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=0.0))  # of the leased two their consumer says what it met
    if death == "told":
        say(service, OBSERVER, m.ProducerGone(name="generator-0"))
    elif death == "new life":
        service.greet("generator-0", m.Hello(role=m.Role.PRODUCER), 0.0)
    said = service.expire(0.1 if death != "silent" else 20.0)
    assert "1 finished groups died with their producers: they are sampled again" in said
    status = say(service, OBSERVER, m.StatusRequest()).status
    assert (status.queued_groups, status.leased, status.in_flight) == (0, 2, 3)
    service.commit()
    service.greet("generator-0", m.Hello(role=m.Role.PRODUCER), 20.0)
    (again,) = tickets(service, 1)
    assert (again.ticket, again.attempt) == (2, 1)
    assert put_direct(service, again, 7) == "accepted"
    say(service, PRODUCER, m.Heartbeat(version=0, in_flight={}, sampled_tokens=0), now_s=20.0)
    assert service.expire(20.1) == []


def test_groups_leased_when_their_producer_was_started_anew_are_not_leased_again_after_a_return(tmp_path: Path) -> None:
    service = new_service(tmp_path, payload="direct")
    for number, ticket in enumerate(tickets(service, 2)):
        put_direct(service, ticket, number)
    assert len(say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=0.0)).groups) == 2
    service.greet("generator-0", m.Hello(role=m.Role.PRODUCER), 0.0)
    say(service, CONSUMER, m.Return(step=0, incarnation=0))
    service.expire(0.1)
    status = say(service, OBSERVER, m.StatusRequest()).status
    assert (status.queued_groups, status.leased, status.in_flight) == (0, 0, 2)


def test_an_address_that_is_none_and_a_queue_with_a_log_refuse_payload_that_stays(tmp_path: Path) -> None:
    service = new_service(tmp_path / "memory", payload="direct")
    first, third = tickets(service, 2)
    assert "source: ipc:// or tcp://" in put_direct(service, first, 0, source="file:///etc/passwd")
    assert "the name of a segment follows" in put_direct(service, third, 0, segment="asyncrl-other.q.generator-0.0")
    logged = new_service(tmp_path / "log", durability="written", payload="inline")
    assert "a queue with a log takes the payload itself" in put_direct(logged, tickets(logged, 1)[0], 0)


def test_a_consumer_of_this_host_reads_the_files_of_the_log(tmp_path: Path) -> None:
    service = new_service(tmp_path, durability="written", payload="inline")
    for ticket in tickets(service, 2):
        assert put(service, ticket, group_for(ticket)) == "accepted"
    metas = say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=0.0)).groups
    expected = {meta.ticket: meta for meta in metas}
    answer = service.answer(CONSUMER, m.Fetch(tickets=(0, 1), files=True), (), 0.0, Call.ONLY)
    assert answer is not None and answer[1] == []
    reader = PayloadReader("r")
    assert reader.reaches(answer[0])
    groups, damaged = reader.read(answer[0], [], expected)
    assert sorted(groups) == [0, 1] and not damaged
    for file in (tmp_path / "queue").rglob("segment-*.log"):
        content = bytearray(file.read_bytes())
        content[answer[0].groups[1].offset + 5] ^= 1
        file.write_bytes(content)
    groups, damaged = PayloadReader("r").read(answer[0], [], expected)
    assert sorted(groups) == [0] and damaged[0][:2] == (1, 0) and "xxh3-64" in damaged[0][2]
    os.mkfifo(tmp_path / "segment-00000009.log")
    pipe = msgspec.structs.replace(answer[0].groups[0], file=str(tmp_path / "segment-00000009.log"))
    assert not reader.reaches(m.Payloads(groups=(pipe,)))
    elsewhere = msgspec.structs.replace(answer[0].groups[0], file="/nowhere/segment-00000000.log")
    assert not reader.reaches(m.Payloads(groups=(elsewhere,)))
    stranger = msgspec.structs.replace(answer[0].groups[0], file="/etc/passwd")
    _, damaged = reader.read(m.Payloads(groups=(stranger,)), [], expected)
    assert "the name of a segment follows" in damaged[0][2]


def test_a_ticket_carries_its_prompt_and_a_seed_that_does_not_depend_on_the_attempt(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    (first,) = tickets(service, 1)
    assert (first.ticket, first.group_id, first.prompt_id, first.prompt, first.answer, first.deadline_s) == (0, "g0", "p0", "0>", "0", 30.0)
    say(service, PRODUCER, m.Fail(ticket=0, attempt=0, reason="engine hiccup"))
    (again,) = tickets(service, 1)
    assert again.attempt == 1 and again.seed == first.seed == ticket_seed(5, 0)
    seeds = {ticket_seed(5, n) for n in range(1000)} | {ticket_seed(6, n) for n in range(1000)}
    assert len(seeds) == 2000 and min(seeds) >= 0 and max(seeds) < 2**31


def test_a_prompt_that_cannot_be_read_is_dropped_and_the_next_one_handed_out(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    assert [ticket.ticket for ticket in tickets(service, 5)] == [0, 1, 2, 4, 5]
    (entry,) = [json.loads(line) for line in RunDir(tmp_path).dead_letter.read_text().splitlines()]
    assert entry["ticket"] == 3 and entry["dropped"] == "unusable" and "row 3: field prompt is missing" in entry["reasons"][0]


def test_a_dead_letter_names_the_prompt_and_every_reason(tmp_path: Path) -> None:
    service = new_service(tmp_path, max_attempts=2)
    for attempt in range(2):
        assert tickets(service, 1)[0].attempt == attempt
        say(service, PRODUCER, m.Fail(ticket=0, attempt=attempt, reason=f"reward hung {attempt}"))
    (entry,) = [json.loads(line) for line in RunDir(tmp_path).dead_letter.read_text().splitlines()]
    reasons = [f"attempt {n} at generator-0: reward hung {n}" for n in range(2)]
    assert entry == {"ticket": 0, "prompt_id": "p0", "dropped": "dead_letter", "reasons": reasons}


def test_a_dead_letter_that_the_disk_refuses_is_said_once_and_written_when_there_is_room(tmp_path: Path, caplog: Any) -> None:
    service = new_service(tmp_path, max_attempts=1)
    file = RunDir(tmp_path).dead_letter
    file.symlink_to("/dev/full")  # every write fails with ENOSPC
    for ticket in tickets(service, 3):
        say(service, PRODUCER, m.Fail(ticket=ticket.ticket, attempt=0, reason="reward hung"))
    assert [record.levelname for record in caplog.records].count("ERROR") == 1 and "No space left on device" in caplog.text
    file.unlink()
    service.expire(1.0)
    assert [json.loads(line)["ticket"] for line in file.read_text().splitlines()] == [0, 1, 2]
    service.expire(2.0)
    assert len(file.read_text().splitlines()) == 3


def lease(service: QueueService, step: int) -> m.Lease:
    found: m.Lease = say(service, CONSUMER, m.LeaseRequest(step=step, incarnation=0, wait_s=0.0))
    return found


@pytest.mark.parametrize("durability", ["memory", "written"])
def test_payload_is_kept_until_its_step_is_committed(tmp_path: Path, durability: str) -> None:
    service = new_service(tmp_path, durability=durability)
    first, second = tickets(service, 2)
    assert [put(service, first, group_for(first)), put(service, second, group_for(second))] == ["accepted", "accepted"]
    assert put(service, first, group_for(first)) == "duplicate"
    leased = lease(service, 0)
    assert read(service, leased.groups) == ([0, 1], [])
    committed = say(service, CONSUMER, m.Commit(step=0, incarnation=0))
    assert committed.frontier == m.Frontier(steps=1, low=2, settled_above=(), trained=2, dropped={})
    assert say(service, CONSUMER, m.Commit(step=0, incarnation=0)) == committed
    service.commit()
    # with a log it is kept beyond the commit, for the checkpoint before it
    assert read(service, leased.groups)[0] == ([] if durability == "memory" else [0, 1])
    say(service, CONSUMER, m.Checkpointed(oldest_step=1, incarnation=0))
    service.commit()
    assert [reason for *_, reason in read(service, leased.groups)[1]] == [
        "the payload of ticket 0 was lost",
        "the payload of ticket 1 was lost",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"checksum": 12345}, "has xxh3-64 0x3039; met"), ({}, "differ in rewards_N"), ({"damage": True}, "not a readable Arrow stream")],
)
def test_payload_that_the_learner_cannot_use_is_sampled_again(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    service = new_service(tmp_path)
    first, second = tickets(service, 2)
    group = group_for(first)
    if "damage" in changes:
        body = b"garbage" * 9
        meta = msgspec.structs.replace(m.PutItem(meta=group.meta(63), checksum=checksum([body]), lengths=(63,)))
        assert say(service, PRODUCER, m.Put(groups=(meta,)), body).outcomes == ("accepted",)
    elif changes:
        assert put(service, first, group, **changes) == "accepted"
    else:
        meta = dataclasses.replace(group.meta(encode_group(group).size), rewards_N=(0.0, 5.0))
        assert put(service, first, group, meta=meta) == "accepted"
    assert put(service, second, group_for(second)) == "accepted"
    leased = lease(service, 0)
    good, damaged = read(service, leased.groups)
    assert good == [1] and damaged[0][:2] == (0, 0) and reason in damaged[0][2]
    say(service, CONSUMER, m.Return(step=0, incarnation=0, damaged=tuple(damaged)))
    (again,) = tickets(service, 1)
    assert (again.ticket, again.attempt) == (0, 1)
    status = say(service, OBSERVER, m.StatusRequest()).status
    assert status.refused == {"damaged": 1} and status.reissued == 1 and status.queued_groups == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards_N": (0.0,)}, "rewards_N: one entry for each of 2 siblings; met 1"),
        ({"rewards_N": (0.0, float("nan"))}, "rewards_N: finite"),
        ({"tokens_by_version": {0: 1}}, "tokens_by_version: positive counts that sum to 2"),
        ({"tokens_by_version": {}}, "tokens_by_version"),
        ({"sampled_tokens_N": (1, 9)}, "sampled_tokens_N: a prompt and sampled tokens within 3; met (2, 9)"),
        ({"lengths_N": (1 << 40, 3)}, "lengths_N: 2 to"),
        ({"payload_bytes": 5}, "payload_bytes: the sum of the frames"),
        ({"incarnation": 3}, "incarnation 0; ticket 0 has tokens of 3"),
    ],
)
def test_metadata_that_does_not_agree_is_refused_and_its_ticket_issued_again(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    service = new_service(tmp_path)
    first, second = tickets(service, 2)
    group = group_for(first)
    outcome = put(service, first, group, meta=dataclasses.replace(group.meta(encode_group(group).size), **change))
    assert outcome.startswith("refused: ") and message in outcome
    assert put(service, second, group_for(second)) == "accepted"
    (again,) = tickets(service, 1)
    assert (again.ticket, again.attempt) == (0, 1)


def test_a_put_whose_frames_are_not_the_announced_ones_is_refused_whole(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    (first,) = tickets(service, 1)
    item = m.PutItem(meta=group_for(first).meta(3), checksum=0, lengths=(3,))
    for frames in ((), (b"ab",), (b"abc", b"d")):
        with pytest.raises(SchemaError, match="frames have the announced sizes"):
            say(service, PRODUCER, m.Put(groups=(item,)), *frames)
    with pytest.raises(SchemaError, match="1 to 256 groups; met 0"):
        say(service, PRODUCER, m.Put(groups=()))


def test_a_request_waits_until_its_last_call_and_is_looked_at_again_with_the_newest_version(tmp_path: Path) -> None:
    service = new_service(tmp_path, max_staleness=0)
    first, second = tickets(service, 2)
    request = m.TicketRequest(version=0, max_tickets=4, wait_s=5.0)
    assert say(service, PRODUCER, request, call=Call.FIRST) is None
    put(service, first, group_for(first))
    put(service, second, group_for(second))
    assert len(say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=5.0), call=Call.FIRST).groups) == 2
    say(service, CONSUMER, m.Commit(step=0, incarnation=0))
    assert say(service, PRODUCER, request, call=Call.AGAIN) is None
    say(service, PRODUCER, m.Heartbeat(version=1, in_flight={}, sampled_tokens=0))
    granted = say(service, PRODUCER, request, call=Call.AGAIN)
    assert [(t.ticket, t.not_before_version) for t in granted.tickets] == [(2, 1), (4, 1)]  # 3 cannot be read
    last = say(service, PRODUCER, m.TicketRequest(version=1, max_tickets=4, wait_s=5.0), call=Call.LAST)
    assert last.tickets == () and "waits for version 2" in last.blocked
    assert "step 1 has 0 of 2 groups" in say(service, CONSUMER, m.LeaseRequest(step=1, incarnation=0, wait_s=1.0), call=Call.LAST).blocked


def test_a_producer_taken_for_dead_gets_no_tickets_by_a_request_that_still_waits(tmp_path: Path) -> None:
    service = new_service(tmp_path, dead_after_s=15.0)
    assert len(tickets(service, 6)) == 6  # indices 0 to 5: 5 // 2 = 2
    request = m.TicketRequest(version=0, max_tickets=5, wait_s=100.0)
    assert say(service, PRODUCER, request, call=Call.FIRST) is None
    assert service.expire(15.0)[0].startswith("producer generator-0 is taken for dead")
    answer = say(service, PRODUCER, request, call=Call.AGAIN, now_s=15.0)
    assert answer.tickets == () and "taken for dead" in answer.blocked
    # it was only slow: its next request brings it back, and the lost tickets with it
    assert [(t.ticket, t.attempt) for t in tickets(service, 2)] == [(0, 1), (1, 1)]


def test_a_ticket_whose_group_a_full_disk_holds_back_is_not_taken_for_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = new_service(tmp_path, durability="written", ticket_deadline_s=10.0, dead_after_s=1000.0)
    first, second = tickets(service, 2)
    with monkeypatch.context() as disk:
        disk.setattr("asyncrl.queue.durable.segments.check_room", no_room)
        service.expire(9.8)
        assert put(service, first, group_for(first)).startswith("held: ")
        assert [service.expire(float(now_s)) for now_s in range(10, 100)] == [[]] * 90
    assert service.expire(100.0) == ["the disk has room again"]
    assert service.expire(101.1) == [] and put(service, first, group_for(first)) == "accepted"
    (late,) = service.expire(101.3)  # 10 s, 90.2 s held, and one until the put comes again
    assert late.startswith(f"ticket {second.ticket}, attempt 0")
    service.close()


def no_room(*_: object) -> None:
    raise DiskFull("no room in the log")


def test_a_group_whose_file_was_deleted_is_said_to_be_lost_and_sampled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.queue.opening.SEGMENT_BYTES", 1000)
    service = new_service(tmp_path, durability="written")
    for ticket in tickets(service, 2):
        assert put(service, ticket, group_for(ticket)) == "accepted"
    (tmp_path / "queue" / "shard-0" / "log" / "segment-00000000.log").unlink()
    good, damaged = read(service, lease(service, 0).groups)
    assert good == [1] and damaged == [(0, 0, "the payload of ticket 0 was lost")]
    say(service, CONSUMER, m.Return(step=0, incarnation=0, damaged=tuple(damaged)))
    (again,) = tickets(service, 1)
    assert (again.ticket, again.attempt) == (0, 1) and put(service, again, group_for(again)) == "accepted"
    service.commit()
    assert read(service, lease(service, 0).groups) == ([0, 1], [])
    service.close()


def test_requests_are_refused_to_the_wrong_role_and_to_an_older_start(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    with pytest.raises(QueueError, match="Commit is for a consumer; generator-0 said hello as a producer"):
        say(service, PRODUCER, m.Commit(step=0, incarnation=0))
    with pytest.raises(QueueError, match="TicketRequest is for a producer"):
        say(service, OBSERVER, m.TicketRequest(version=0, max_tickets=1, wait_s=0.0))
    with pytest.raises(QueueError, match="1 ticket or more; met 0"):
        say(service, PRODUCER, m.TicketRequest(version=0, max_tickets=0, wait_s=0.0))
    with pytest.raises(FencedError, match="incarnation 0; generator-9 is of 4"):
        service.greet("generator-9", m.Hello(role=m.Role.PRODUCER, incarnation=4), 0.0)


@pytest.mark.parametrize(
    ("changes", "met"),
    [({"dropped": {"x": 1}}, "'x': 1"), ({"dropped": {"stale": -1, "unusable": 2}}, "'stale': -1"), ({"trained": -1}, "trained=-1")],
)
def test_a_restore_whose_counts_cannot_be_is_refused_and_the_queue_goes_on(tmp_path: Path, changes: dict[str, Any], met: str) -> None:
    service = new_service(tmp_path)
    restore = msgspec.structs.replace(m.Frontier(steps=0, low=1, settled_above=(), trained=0, dropped={"stale": 1}), **changes)
    with pytest.raises(DataError, match=met):
        service.greet(CONSUMER.sender, m.Hello(role=m.Role.CONSUMER, restore=restore), 0.0)
    assert service.gate.frontier() == m.Frontier(steps=0, low=0, settled_above=(), trained=0, dropped={})


def test_lockstep_says_advance_once_at_once_and_then_lets_the_producer_wait(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "algorithm": {"groups_per_step": 1, "no_signal": "keep"},
            "queue": {"schedule": "lockstep", "max_staleness": 0, "durability": "memory"},
        }
    )
    service = opened(tmp_path, config)
    service.greet("generator-0", m.Hello(role=m.Role.PRODUCER), 0.0)
    (ticket,) = tickets(service, 1)
    assert ticket.exact_version == 0
    request = m.TicketRequest(version=0, max_tickets=1, wait_s=5.0)
    assert say(service, PRODUCER, request, call=Call.FIRST) is None  # ticket 0 may still come back
    put(service, ticket, group_for(ticket))
    assert say(service, PRODUCER, request, call=Call.AGAIN).advance
    assert say(service, PRODUCER, request, call=Call.FIRST) is None
    assert say(service, PRODUCER, request, call=Call.LAST).advance


def test_a_stop_ends_tickets_and_with_exit_the_broker(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    say(service, OBSERVER, m.Stop())
    assert say(service, PRODUCER, m.TicketRequest(version=0, max_tickets=1, wait_s=9.0), call=Call.FIRST).stopping
    assert say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=9.0), call=Call.FIRST).ended
    assert not service.exiting
    say(service, OBSERVER, m.Stop(exit=True))
    assert service.exiting


def test_a_producer_that_was_forgotten_is_asked_to_greet_again(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    service.gate.fleet._limit = 1
    service.gate.fleet.gone("generator-0", "silent")
    service.greet("generator-1", m.Hello(role=m.Role.PRODUCER), 1.0)
    with pytest.raises(UnknownSession, match="greet again"):
        service.answer(PRODUCER, m.Heartbeat(version=0, in_flight={}, sampled_tokens=0), (), 2.0, Call.ONLY)
    assert not service.remembers("generator-0", m.Role.PRODUCER) and service.remembers("driver", m.Role.OBSERVER)


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    service = new_service(tmp_path, durability="written")
    service.close()
    with (tmp_path / "other").open("w") as other:
        service.close()
        other.write("still open")
    assert (tmp_path / "other").read_text() == "still open"


@pytest.mark.parametrize("segment", ["nowhere", "asyncrl-r.q.generator-1.0", "a.b"])
def test_a_refused_put_releases_no_segment_but_the_senders_own(tmp_path: Path, segment: str) -> None:
    service = new_service(tmp_path)
    (ticket,) = tickets(service, 1)
    group = group_for(ticket, attempt=7)
    item = m.PutItem(meta=group.meta(64), checksum=1, lengths=(64,), segment=segment)
    answer = say(service, PRODUCER, m.Put(groups=(item,)))
    assert answer.outcomes[0].startswith("refused: ") and answer.released == ()
    for owner in ("nowhere", "generator-1", "a", ""):
        assert service._store.take_released(owner) == ()


def test_a_put_whose_segment_is_gone_is_refused_and_its_ticket_issued_again(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    (ticket,) = tickets(service, 1)
    item = m.PutItem(meta=group_for(ticket).meta(64), checksum=1, lengths=(64,), segment="asyncrl-r.q.generator-0.99")
    (outcome,) = say(service, PRODUCER, m.Put(groups=(item,))).outcomes
    assert outcome.startswith("refused: ") and "cannot be opened" in outcome
    (again,) = tickets(service, 1)
    assert (again.ticket, again.attempt) == (0, 1)


def test_payload_whose_segment_somebody_removed_comes_out_of_the_log(tmp_path: Path) -> None:
    service = new_service(tmp_path, durability="written")
    arena = Arena("r", "generator-0", 1 << 20)
    try:
        for ticket in tickets(service, 2):
            group = group_for(ticket)
            segment = arena.write([encode_group(group).to_pybytes()])
            item = m.PutItem(meta=group.meta(segment.length), checksum=segment.checksum, lengths=(segment.length,), segment=segment.name)
            assert say(service, PRODUCER, m.Put(groups=(item,))).outcomes == ("accepted",)
        SegmentKeeper("r").unlink(segment.name)
        service.commit()
        assert read(service, lease(service, 0).groups) == ([0, 1], [])
        service.close(sweep=False)
        assert len(list(SHM_FOLDER.glob("asyncrl-r.q.*"))) == 1, "another shard may still serve it"
    finally:
        arena.close(unlink=True)
