"""Requests answered without a socket: roles, waiting, payload, dead letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir
from asyncrl.errors import DataError, FencedError, QueueError, SchemaError
from asyncrl.queue import messages as m
from asyncrl.queue.gate import Gate
from asyncrl.queue.prompts import TicketPrompts, ticket_seed
from asyncrl.queue.service import Call, QueueService
from asyncrl.queue.sessions import Session
from asyncrl.queue.settings import GateSettings
from asyncrl.queue.wire import checksum
from asyncrl.tasks.prompt import Prompt
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan, encode_group

PRODUCER = Session("generator-0", b"p", m.Hello(role=m.Role.PRODUCER))
CONSUMER = Session("learner-0", b"c", m.Hello(role=m.Role.CONSUMER))
OBSERVER = Session("driver", b"o", m.Hello(role=m.Role.OBSERVER))


class Numbers:
    """Prompts that are their own index; index 3 cannot be read."""

    size = None

    def prompt(self, index: int) -> Prompt:
        if index == 3:
            raise DataError("row 3: field prompt is missing")
        return Prompt(prompt_id=f"p{index}", prompt=f"{index}>", answer=str(index))


def new_service(path: Path, **queue: Any) -> QueueService:
    config = Config.model_validate({"algorithm": {"groups_per_step": 2}, "queue": {"max_staleness": 2, **queue}})
    service = QueueService(Gate(GateSettings.from_config(config, None)), TicketPrompts(Numbers(), 5, 30.0), RunDir(path), 0)
    for session in (PRODUCER, CONSUMER, OBSERVER):
        service.greet(session.sender, m.Hello(role=session.role), 0.0)
    return service


def payload_for(ticket: m.Ticket, **changes: Any) -> bytes:
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
    return encode_group(TrajectoryGroup(trajectories=tuple(rows))).to_pybytes()


def say(service: QueueService, session: Session, body: m.RequestBody, *payloads: bytes, call: Call = Call.ONLY, now_s: float = 0.0) -> Any:
    answer = service.answer(session, body, payloads, now_s, call)
    return None if answer is None else answer[0]


def tickets(service: QueueService, number: int) -> list[m.Ticket]:
    return list(say(service, PRODUCER, m.TicketRequest(version=0, max_tickets=number, wait_s=0.0)).tickets)


def put(service: QueueService, ticket: m.Ticket, payload: bytes, total: int | None = None) -> str:
    body = m.Put(tickets=((ticket.ticket, ticket.attempt),), checksums=(checksum(payload) if total is None else total,))
    (outcome,) = say(service, PRODUCER, body, payload).outcomes
    return outcome


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


def test_payload_is_kept_until_its_step_is_committed(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    first, second = tickets(service, 2)
    payloads = [payload_for(first), payload_for(second)]
    assert [put(service, first, payloads[0]), put(service, second, payloads[1])] == ["accepted", "accepted"]
    assert put(service, first, payloads[0]) == "duplicate"
    lease = say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=0.0))
    assert [meta.payload_bytes for meta in lease.groups] == [len(p) for p in payloads]
    answer = service.answer(CONSUMER, m.Fetch(tickets=(1, 0)), (), 0.0, Call.ONLY)
    assert answer is not None and [bytes(frame) for frame in answer[1]] == payloads[::-1]
    committed = say(service, CONSUMER, m.Commit(step=0, incarnation=0))
    assert committed.frontier == m.Frontier(steps=1, low=2, settled_above=(), trained=2, dropped={})
    with pytest.raises(QueueError, match="no payload"):
        say(service, CONSUMER, m.Fetch(tickets=(0,)))
    assert say(service, CONSUMER, m.Commit(step=0, incarnation=0)) == committed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p, 12345), "CRC-32 12345; met"),
        (lambda p: (p[:-40], None), "refused: "),
        (lambda p: (b"garbage", None), "not a readable Arrow stream"),
    ],
)
def test_damaged_payload_fails_its_attempt_and_leaves_the_rest_alone(tmp_path: Path, damage: Any, message: str) -> None:
    service = new_service(tmp_path)
    first, second = tickets(service, 2)
    payload, total = damage(payload_for(first))
    assert message in put(service, first, payload, total)
    assert put(service, second, payload_for(second)) == "accepted"
    (again,) = tickets(service, 1)
    assert (again.ticket, again.attempt) == (0, 1)
    status = say(service, OBSERVER, m.StatusRequest()).status
    assert status.refused == {"SchemaError": 1} and status.reissued == 1


def test_payload_of_another_ticket_or_incarnation_is_refused(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    first, second = tickets(service, 2)
    assert "header and payload name one ticket and attempt; met (0, 0) and (1, 0)" in put(service, first, payload_for(second))
    assert "incarnation 0; ticket 1 has tokens of 3" in put(service, second, payload_for(second, incarnation=3))
    with pytest.raises(SchemaError, match="1 tickets, 2 checksums, 0 payloads"):
        say(service, PRODUCER, m.Put(tickets=((0, 0),), checksums=(1, 2)))


def test_flipped_bytes_of_a_payload_are_refused_or_harmless_and_never_end_the_broker(tmp_path: Path) -> None:
    service = new_service(tmp_path, max_attempts=1, max_staleness=1000)
    random = np.random.default_rng(0)
    outcomes = []
    for ticket in [t for _ in range(4) for t in tickets(service, 60)]:
        damaged = bytearray(payload_for(ticket))
        for position in random.integers(0, len(damaged), size=3):
            damaged[position] ^= int(random.integers(1, 256))
        outcomes.append(put(service, ticket, bytes(damaged)))
    assert all(outcome == "accepted" or outcome.startswith("refused: ") for outcome in outcomes)
    assert sum(outcome != "accepted" for outcome in outcomes) > 50
    status = say(service, OBSERVER, m.StatusRequest()).status
    assert status.admitted == 241 and status.queued_groups == outcomes.count("accepted")  # and prompt 3


def test_a_request_waits_until_its_last_call_and_is_looked_at_again_with_the_newest_version(tmp_path: Path) -> None:
    service = new_service(tmp_path, max_staleness=0)
    first, second = tickets(service, 2)
    request = m.TicketRequest(version=0, max_tickets=4, wait_s=5.0)
    assert say(service, PRODUCER, request, call=Call.FIRST) is None
    put(service, first, payload_for(first))
    put(service, second, payload_for(second))
    lease = m.LeaseRequest(step=0, incarnation=0, wait_s=5.0)
    assert len(say(service, CONSUMER, lease, call=Call.FIRST).groups) == 2
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


def test_lockstep_says_advance_once_at_once_and_then_lets_the_producer_wait(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"algorithm": {"groups_per_step": 1, "no_signal": "keep"}, "queue": {"schedule": "lockstep", "max_staleness": 0}}
    )
    service = QueueService(Gate(GateSettings.from_config(config, None)), TicketPrompts(Numbers(), 5, 30.0), RunDir(tmp_path), 0)
    service.greet("generator-0", m.Hello(role=m.Role.PRODUCER), 0.0)
    (ticket,) = tickets(service, 1)
    assert ticket.exact_version == 0
    request = m.TicketRequest(version=0, max_tickets=1, wait_s=5.0)
    assert say(service, PRODUCER, request, call=Call.FIRST) is None  # ticket 0 may still come back
    put(service, ticket, payload_for(ticket))
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
