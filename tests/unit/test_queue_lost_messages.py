"""B56: messages that a connection lost leave a gap; its client closes it, and nothing is lost or taken twice."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_queue_service import group_for

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import PeerTimeout
from asyncrl.queue import messages as m
from asyncrl.queue.__main__ import new_broker
from asyncrl.queue.broker import Broker
from asyncrl.queue.client import Observer, Producer
from asyncrl.queue.ledger import EMPTY
from asyncrl.queue.producer import ProducerLink
from asyncrl.queue.wire import Dialogue, decode_request, encode


def run_in(path: Path) -> RunDir:
    run_dir = RunDir(path)
    queue = {"dead_after_s": 1.5, "heartbeat_s": 0.2, "payload": "inline", "durability": "memory"}
    run_dir.write_config(Config.model_validate({"queue": queue}))
    facts = {"queue_endpoints": (f"ipc://{path}/q",), "sync_endpoint": "", "rendezvous": "", "model_dir": ""}
    run_dir.write_facts(RunFacts(run_id="r", incarnation=0, generator_device="cpu", learner_device="cpu", **facts))
    return run_dir


@contextlib.contextmanager
def serving(run_dir: RunDir) -> Iterator[Broker]:
    broker = new_broker(run_dir)
    thread = threading.Thread(target=broker.run)
    thread.start()
    try:
        yield broker
    finally:
        broker.ending = True
        thread.join(timeout=30)


class Lossy:
    """Stands before a client's way to send, and loses the next message of a kind: the client believes that it was sent."""

    def __init__(self, send: Any) -> None:
        self.send = send
        self.lose: type | None = None

    def __call__(self, frames: list[Any]) -> bool:
        if self.lose is not None and isinstance(decode_request(frames[0]).body, self.lose):
            self.lose = None
            return True
        return bool(self.send(frames))


@pytest.mark.parametrize("lost", [m.Put, m.Fail, m.Heartbeat, m.TicketRequest])
def test_b56_a_producer_whose_message_was_lost_goes_on_and_every_group_is_taken_once(tmp_path: Path, lost: type) -> None:
    run_dir = run_in(tmp_path)

    async def scene() -> None:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-0")
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(producer.close)
            await stack.enter_async_context(asyncio.timeout(20.0))
            link: Any = producer._links[0]
            link._try_send = lossy = Lossy(link._try_send)
            tickets = (await producer.tickets(0, 5, wait_s=1.0)).tickets
            puts = [producer.put([group_for(ticket)]) for ticket in tickets[:4]]
            lossy.lose = lost
            asked = [producer.fail(tickets[4].ticket, 0, "no answer"), producer.heartbeat(0, {}, 3), producer.tickets(0, 2, wait_s=0.0)]
            outcomes, (_, _, more) = await asyncio.gather(asyncio.gather(*puts), asyncio.gather(*asked))
            assert lossy.lose is None
            assert outcomes == [["accepted"]] * 4 and len(more.tickets) == 2

    with serving(run_dir) as broker:
        asyncio.run(scene())
        status = broker._service.gate.status()
        assert (status.queued_groups, status.in_flight) == (4, 4 + status.generating)
        assert broker._service.refused.keys() <= {"LostMessage"} and not broker._violations


def test_b56_a_blocking_client_whose_message_was_lost_until_its_deadline_goes_on(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path)
    with serving(run_dir), Observer.connect(run_dir.read_config(), run_dir.read_facts(), "driver", answer_s=0.3) as observer:
        link: Any = observer._links[0]
        send = link._send
        link._send = lambda frames: True
        with pytest.raises(PeerTimeout):
            observer.producer_gone("generator-0")
        link._send = send
        assert observer.status().refused == {"LostMessage": 1}


def test_b56_a_burst_beyond_a_gap_cuts_no_client_off_and_a_flood_does(tmp_path: Path) -> None:
    broker = new_broker(run_in(tmp_path))

    def say(number: int, body: m.RequestBody) -> Any:
        header = m.Request(protocol=m.PROTOCOL_VERSION, run_id="r", sender="driver", sequence=number, body=body)
        broker.receive(b"driver.1", [encode(header)], 0.0)
        ((_, (reply,)),) = broker._outbox or [(b"", [b""])]
        broker._outbox.clear()
        return dialogue.reply([reply])[1] if reply else None

    dialogue = Dialogue(endpoint="", run_id="r", sender="driver", max_message_bytes=1 << 20)
    say(0, m.Hello(role=m.Role.OBSERVER))
    last = 0
    for _ in range(4):
        for number in range(last + 2, last + 202):
            assert say(number, m.StatusRequest()).kind == "LostMessage"
        assert isinstance(say(last + 202, m.Hello(role=m.Role.OBSERVER, again=True)), m.Welcome)
        last += 203
        assert isinstance(say(last, m.StatusRequest()), m.Status)
    assert broker._service.refused["LostMessage"] == 800
    for number in range(last + 2, last + 2 + 512):
        assert say(number, m.StatusRequest()).kind in ("LostMessage", "QueueError")
    assert say(last + 1, m.StatusRequest()) is None and broker._service.refused["cut_off"] == 1
    broker.ending = True
    broker.run()


def test_b56_tickets_of_an_answer_that_was_lost_and_forgotten_are_issued_again_and_no_others(tmp_path: Path) -> None:
    broker = new_broker(run_in(tmp_path))
    dialogue = Dialogue(endpoint="", run_id="r", sender="generator-0", max_message_bytes=1 << 20)

    def say(body: m.RequestBody) -> Any:
        sequence, frames = dialogue.request(body)
        dialogue.sent(sequence)
        broker.receive(b"generator-0.1", frames, 0.0)
        ((_, (reply,)),) = broker._outbox
        broker._outbox.clear()
        return dialogue.reply([reply])[1]

    request = m.TicketRequest(version=0, max_tickets=2, wait_s=0.0)
    say(m.Hello(role=m.Role.PRODUCER))
    held = [(ticket.ticket, ticket.attempt) for ticket in say(request).tickets]
    lost = say(request).tickets
    for _ in range(64):
        say(m.Heartbeat(version=0, in_flight={}, sampled_tokens=0))
    on_its_way = say(request).tickets
    say(m.Hello(role=m.Role.PRODUCER, again=True, tickets=tuple(held)))
    again = say(request).tickets
    assert [(ticket.ticket, ticket.attempt) for ticket in again] == [(ticket.ticket, 1) for ticket in lost] == [(2, 1), (3, 1)]
    for ticket in (*again, *on_its_way):
        assert broker._service.gate.expects("generator-0", ticket.ticket, ticket.attempt)
    assert all(broker._service.gate.expects("generator-0", *key) for key in held)
    broker.ending = True
    broker.run()


def test_b56_tickets_granted_to_a_request_that_was_refused_first_reach_the_next_caller(tmp_path: Path) -> None:
    ticket = m.Ticket(
        ticket=0,
        attempt=0,
        group_id="g",
        prompt_id="p",
        prompt="",
        is_chat=False,
        answer="",
        extra="",
        seed=0,
        deadline_s=9.0,
        not_before_version=0,
    )

    async def scene() -> None:
        dialogue = Dialogue(endpoint=f"ipc://{tmp_path}/q", run_id="r", sender="generator-0", max_message_bytes=1 << 20)
        link = ProducerLink(dialogue, 0, answer_s=9.0)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(link.close)
            await stack.enter_async_context(asyncio.timeout(20.0))
            call = asyncio.create_task(link.tickets(0, 1, 0.0))
            answers = (m.Refused(kind="LostMessage", message=""), m.Welcome(protocol=m.PROTOCOL_VERSION, frontier=EMPTY))
            for number, answer in enumerate(answers):
                while number not in link._waiting:
                    await asyncio.sleep(0)
                link._settle(number, answer)
            while 2 not in link._waiting:
                await asyncio.sleep(0)
            link._settle(0, m.Tickets(tickets=(ticket,)))  # the first request, sent twice: the broker took the second
            link._settle(2, m.Tickets(tickets=(), blocked="shut"))
            assert not (await call).tickets
            assert (await link.tickets(0, 1, 0.0)).tickets == (ticket,)

    asyncio.run(scene())
