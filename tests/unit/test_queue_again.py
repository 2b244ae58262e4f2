"""B58: clients of a broker that died greet the next one, and the queue goes back to a checkpoint; found by kill -9 (tests/chaos)."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from durable_setup import new_ledger
from test_queue_service import CONSUMER, OBSERVER, PRODUCER, group_for, new_service, put, say, tickets
from test_queue_sessions import HELLO, dialogue, envelope

import asyncrl.queue
from asyncrl.errors import PeerTimeout, QueueError, UnknownSession
from asyncrl.queue import messages as m
from asyncrl.queue.connection import BlockingClient
from asyncrl.queue.durable.rows import Changes, GroupRow
from asyncrl.queue.inspect import open_shards
from asyncrl.queue.ledger import EMPTY
from asyncrl.queue.service import Call, QueueService
from asyncrl.queue.sessions import Arrival, Session, Sessions
from asyncrl.queue.verify import verify

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_trainer.py"


def again(path: Path, service: QueueService | None = None, **queue: Any) -> QueueService:
    """The next broker over what the last one left; all clients greet as new."""
    if service is not None:
        service.commit()
        service.close()
    return new_service(path, durability="written", **queue)


def test_b58_a_ticket_that_its_producer_never_got_is_issued_again_and_the_others_stay(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    assert [ticket.ticket for ticket in tickets(service, 3)] == [0, 1, 2]
    service.greet("generator-0", m.Hello(role=m.Role.PRODUCER, again=True, tickets=((0, 0), (2, 0), (9, 0))), 1.0)
    (lost,) = tickets(service, 1)
    assert (lost.ticket, lost.attempt) == (1, 1)
    service.greet("generator-0", m.Hello(role=m.Role.PRODUCER, again=True, tickets=((0, 0), (1, 0), (2, 0))), 2.0)
    (lost,) = tickets(service, 1)
    assert (lost.ticket, lost.attempt) == (1, 2), "attempt 0 of ticket 1 is not attempt 1"


def test_b58_a_learner_that_goes_back_leaves_producers_of_this_start_welcome(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    for ticket in tickets(service, 2):
        assert put(service, ticket, group_for(ticket)) == "accepted"
    assert len(say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=0.0)).groups) == 2
    say(service, CONSUMER, m.Commit(step=0, incarnation=0))
    service.greet("learner-0", m.Hello(role=m.Role.CONSUMER, incarnation=1, restore=EMPTY), 0.0)
    (ticket,) = tickets(service, 1)
    assert put(service, ticket, group_for(ticket)) == "accepted"


def test_b58_a_stop_outlives_a_restore_and_the_broker(tmp_path: Path) -> None:
    service = again(tmp_path)
    for ticket in tickets(service, 2):
        put(service, ticket, group_for(ticket))
    say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=0.0))
    say(service, CONSUMER, m.Commit(step=0, incarnation=0))
    say(service, OBSERVER, m.Stop())
    service.greet("learner-0", m.Hello(role=m.Role.CONSUMER, incarnation=0, restore=EMPTY), 0.0)
    request = m.TicketRequest(version=0, max_tickets=1, wait_s=9.0)
    assert say(service, PRODUCER, request, call=Call.FIRST).stopping
    service = again(tmp_path, service)
    assert say(service, PRODUCER, request, call=Call.FIRST).stopping
    service.commit()
    service.close()


def test_a_trainer_that_ended_before_its_first_checkpoint_takes_the_queue_back_to_the_empty_frontier(tmp_path: Path) -> None:
    policy = runpy.run_path(str(EXAMPLE))["Policy"](tmp_path / "policy.json")  # the trainer of your own, with nothing saved
    assert policy.frontier == asyncrl.queue.EMPTY == EMPTY and policy.current[0] == 0
    service = again(tmp_path)
    service.greet("learner-0", m.Hello(role=m.Role.CONSUMER, restore=policy.frontier), 0.0)
    for ticket in tickets(service, 2):
        put(service, ticket, group_for(ticket))
    step_0 = m.LeaseRequest(step=0, incarnation=0, wait_s=0.0)
    trained = say(service, CONSUMER, step_0).groups
    say(service, CONSUMER, m.Commit(step=0, incarnation=0))
    service = again(tmp_path, service)
    with pytest.raises(QueueError, match="the next is step 1; met step 0"):
        say(service, CONSUMER, step_0)
    service.greet("learner-0", m.Hello(role=m.Role.CONSUMER, restore=policy.frontier), 0.0)
    assert say(service, CONSUMER, step_0).groups == trained
    service.close()


def test_a_later_start_of_the_run_is_not_stopped(tmp_path: Path) -> None:
    service = again(tmp_path)
    say(service, OBSERVER, m.Stop())
    service.commit()
    service.close()
    service = new_service(tmp_path, incarnation=1, durability="written")
    producer = Session("generator-0", b"p", m.Hello(role=m.Role.PRODUCER, incarnation=1), 0)
    assert len(say(service, producer, m.TicketRequest(version=0, max_tickets=1, wait_s=9.0)).tickets) == 1
    service.close()


def test_b58_what_was_being_sampled_leaves_the_ledger_with_a_restore(tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path)
    rows = [GroupRow(ticket=number, attempt=0, state=state) for number, state in enumerate(["trained", "generating", "reissue", "queued"])]
    ledger.write(Changes(groups=tuple(rows)))
    ledger.begin_branch(0, Changes(groups=(rows[3],)))
    assert [row.ticket for row in ledger.load().live] == [3]
    ledger.close()


def test_b58_a_broker_that_was_started_again_still_knows_what_was_dropped_when_the_queue_goes_back(tmp_path: Path) -> None:
    service = again(tmp_path)
    first, *others = tickets(service, 3)
    say(service, PRODUCER, m.Fail(ticket=first.ticket, attempt=0, reason="cannot be", final=True))
    for ticket in others:
        put(service, ticket, group_for(ticket))
    say(service, CONSUMER, m.LeaseRequest(step=0, incarnation=0, wait_s=0.0))
    say(service, CONSUMER, m.Commit(step=0, incarnation=0))
    service = again(tmp_path, service)
    service.greet("learner-0", m.Hello(role=m.Role.CONSUMER, restore=EMPTY), 0.0)
    assert service.gate.status().dropped == {"abandoned": 1}  # the groups trained wait again, with their payload
    (ticket,) = tickets(service, 1)
    assert (ticket.ticket, ticket.attempt) == (0, 1)
    service.commit()
    service.close()
    with open_shards(tmp_path) as shards:
        assert verify(shards).sound


def test_b56_a_second_hello_of_the_same_process_carries_its_numbers_on() -> None:
    sessions = Sessions()
    session = sessions.open(envelope(27), b"a", HELLO)
    assert sessions.greeted(envelope(28), b"a") is session and sessions.greeted(envelope(28), b"b") is None
    assert session.greeted_again(28) is Arrival.NEW
    assert session.arrive(29) is Arrival.NEW
    assert session.greeted_again(27) is Arrival.REPEAT  # the first one once more
    assert session.arrive(30) is Arrival.NEW


def test_b56_a_repeat_from_before_the_hello_is_asked_anew() -> None:
    session = Session("generator-0", b"a", HELLO, 28)
    with pytest.raises(UnknownSession, match="repeats number 26, from before its hello"):
        session.arrive(26)
    assert session.arrive(29) is Arrival.NEW


def test_b56_a_request_whose_deadline_passed_before_it_was_sent_takes_no_number(tmp_path: Path) -> None:
    talk = dialogue()
    talk.endpoint = f"ipc://{tmp_path}/q"
    client = BlockingClient(talk, 0, answer_s=0.0)
    with pytest.raises(PeerTimeout):
        client.ask(m.StatusRequest())
    assert talk.request(m.StatusRequest())[0] == 0
    client.close()
