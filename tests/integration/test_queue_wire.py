"""B56 over real sockets: gaps, repeats, sizes, garbage. Nothing is lost without an error, and the broker lives on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from queue_run import broker, group_for, new_run

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import QueueError, SchemaError
from asyncrl.queue.client import Observer, Producer
from asyncrl.queue.ledger import EMPTY
from asyncrl.queue.messages import (
    PROTOCOL_VERSION,
    Hello,
    Put,
    PutItem,
    Refused,
    Request,
    Role,
    StatusRequest,
    TicketRequest,
    Tickets,
    Welcome,
)
from asyncrl.queue.wire import Dialogue, encode
from asyncrl.trajectory import GroupMeta

pytestmark = pytest.mark.real
LIMITS = {"max_staleness": 1000, "max_message_mib": 1, "dead_after_s": 3.0, "payload": "inline"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """One broker for all tests here; it must survive each of them."""
    run_dir = new_run(
        tmp_path_factory.mktemp("run"), queue={"max_staleness": 1000, "max_message_mib": 1, "dead_after_s": 3.0, "payload": "inline"}
    )
    with broker(run_dir) as process:
        status(run_dir, "first")  # it is up
        yield run_dir
        assert process.poll() is None
        with Observer.connect(run_dir.read_config(), run_dir.read_facts(), "driver") as observer:
            observer.stop(exit=True)
        assert process.wait(timeout=3) == 0


class Raw:
    """A DEALER that sends what it is told and returns decoded replies."""

    def __init__(self, run_dir: RunDir, name: str) -> None:
        facts = run_dir.read_facts()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(facts.queue_endpoints[0])
        self.run_id = facts.run_id
        self.dialogue = Dialogue(endpoint=facts.queue_endpoints[0], run_id=facts.run_id, sender=name, max_message_bytes=1 << 30)

    def send(self, sequence: int, body: Any, *payloads: bytes, run_id: str = "", protocol: int = PROTOCOL_VERSION) -> None:
        header = Request(protocol=protocol, run_id=run_id or self.run_id, sender=self.dialogue.sender, sequence=sequence, body=body)
        self.socket.send_multipart([encode(header), *payloads])

    def reply(self, timeout_s: float = 3.0) -> tuple[int, Any]:
        assert self.socket.poll(int(timeout_s * 1000)), "no reply"
        return self.dialogue.reply(self.socket.recv_multipart())[:2]

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close(linger=0)
        self.context.term()


def item(lengths: tuple[int, ...]) -> PutItem:
    meta = GroupMeta(
        group_id="g0",
        ticket=0,
        attempt=0,
        incarnation=0,
        generator="garbage",
        lengths_N=(3,),
        prompt_lengths_N=(2,),
        sampled_tokens_N=(1,),
        rewards_N=(1.0,),
        tokens_by_version={0: 1},
        payload_bytes=sum(lengths),
    )
    return PutItem(meta=meta, checksum=0, lengths=lengths)


def status(run_dir: RunDir, name: str) -> Any:
    with Observer.connect(run_dir.read_config(), run_dir.read_facts(), name) as observer:
        return observer.status()


def test_b56_a_gap_is_refused_and_a_repeat_gets_the_same_tickets_again(run_dir: RunDir) -> None:
    with Raw(run_dir, "generator-gap") as raw:
        raw.send(0, Hello(role=Role.PRODUCER))
        assert raw.reply() == (0, Welcome(protocol=PROTOCOL_VERSION, frontier=EMPTY))
        raw.send(2, TicketRequest(version=0, max_tickets=1, wait_s=0.0))
        sequence, refused = raw.reply()
        assert sequence == 2 and isinstance(refused, Refused) and refused.kind == "LostMessage" and "after 0 came 2" in refused.message
        for _ in range(2):
            raw.send(1, TicketRequest(version=0, max_tickets=2, wait_s=0.0))
        first, second = raw.reply(), raw.reply()
        assert isinstance(first[1], Tickets) and len(first[1].tickets) == 2
        assert first == second


def test_b56_a_repeat_of_a_request_that_waits_gets_one_answer(run_dir: RunDir) -> None:
    with Raw(run_dir, "learner-repeat") as raw:
        from asyncrl.queue.messages import Lease, LeaseRequest

        raw.send(0, Hello(role=Role.CONSUMER))
        raw.reply()
        for _ in range(3):
            raw.send(1, LeaseRequest(step=0, incarnation=0, wait_s=0.5))
        sequence, lease = raw.reply()
        assert sequence == 1 and isinstance(lease, Lease) and "step 0 has 0 of 16 groups" in lease.blocked
        assert not raw.socket.poll(300)


def test_b56_the_sender_refuses_a_group_over_the_limit_and_goes_on(run_dir: RunDir) -> None:
    async def scene() -> None:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-big")
        first, second = (await producer.tickets(0, 2, wait_s=1.0)).tickets
        started_s = time.monotonic()
        with pytest.raises(QueueError, match=r"queue.max_message_mib = 1 MiB .* met \d{7} bytes"):
            await producer.put([group_for(second, 0), group_for(first, 0, tokens=120_000)])
        assert time.monotonic() - started_s < 2.0
        # nothing of that put was sent, and the numbers have no gap
        assert await producer.put([group_for(second, 0)]) == ["accepted"]
        await producer.fail(first.ticket, first.attempt, "too large", final=True)
        await producer.close()

    asyncio.run(scene())


def test_b56_overlapping_requests_of_one_producer_are_all_answered(run_dir: RunDir) -> None:
    async def scene() -> None:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-busy")
        numbers: list[int] = []

        async def one() -> None:
            for ticket in (await producer.tickets(0, 1, wait_s=1.0)).tickets:
                numbers.append(ticket.ticket)
                await producer.heartbeat(0, {0: 1}, 1)
                assert await producer.put([group_for(ticket, 0)]) == ["accepted"]

        await asyncio.gather(*[one() for _ in range(100)])
        assert len(set(numbers)) == 100
        await producer.close()

    asyncio.run(scene())


def test_tickets_granted_to_a_cancelled_call_are_handed_to_the_next_one(run_dir: RunDir) -> None:
    async def scene() -> None:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-cancel")
        call = asyncio.create_task(producer.tickets(0, 3, wait_s=1.0))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await producer.heartbeat(0, {}, 0)  # answered after the tickets
        answers = [await producer.tickets(0, n, wait_s=1.0) for n in (1, 4, 1)]
        assert [len(answer.tickets) for answer in answers] == [1, 2, 1]  # what was granted to it first, and never more than asked for
        numbers = [ticket.ticket for answer in answers for ticket in answer.tickets]
        assert numbers == list(range(numbers[0], numbers[0] + 4))
        await producer.close()

    asyncio.run(scene())


def test_garbage_is_counted_answered_where_possible_and_ends_nothing(run_dir: RunDir) -> None:
    before = status(run_dir, "before").refused.get("SchemaError", 0)
    with Raw(run_dir, "garbage") as raw:
        for frames in ([b"\xc1\xff"], [b""], [msgspec.msgpack.encode({"protocol": 1})], [b"x" * 1000, b"y"]):
            raw.socket.send_multipart(frames)
            sequence, refused = raw.reply()
            assert sequence == -1 and isinstance(refused, Refused) and refused.kind == "SchemaError"
        raw.send(1, StatusRequest(), protocol=7)
        assert f"speaks protocol {PROTOCOL_VERSION}; met 7" in raw.reply()[1].message
        raw.send(1, StatusRequest(), run_id="another")
        assert f"serves run {raw.run_id}; met a request for run 'another'" in raw.reply()[1].message
        raw.send(1, StatusRequest())
        assert "garbage is not known here" in raw.reply()[1].message
        raw.send(0, Hello(role=Role.PRODUCER, incarnation=9))
        assert raw.reply()[1].kind == "FencedError"
        raw.send(0, Hello(role=Role.PRODUCER))
        assert isinstance(raw.reply()[1], Welcome)
        raw.send(1, Put(groups=(item(lengths=(1,)),)), b"a", b"b")
        assert "met [1, 1] (1 and 2 frames)" in raw.reply()[1].message
    with Raw(run_dir, "older") as raw:
        raw.send(0, Hello(role=Role.PRODUCER, schema=99))
        assert "holds trajectories of schema 1; older has 99" in raw.reply()[1].message
    assert status(run_dir, "after").refused["SchemaError"] == before + 7


def test_a_frame_over_the_limit_of_a_careless_sender_does_not_end_the_broker(run_dir: RunDir) -> None:
    with Raw(run_dir, "careless") as raw:
        raw.send(0, Hello(role=Role.PRODUCER))
        raw.reply()
        raw.send(1, Put(groups=(item(lengths=(2 << 20,)),)), bytes(2 << 20))
        assert not raw.socket.poll(300)  # ZeroMQ drops it without a word: why the sender must check
    assert status(run_dir, "after-careless").refused.get("unsent", 0) == 0


def test_two_processes_under_one_name_are_told_apart(run_dir: RunDir) -> None:
    config, facts = run_dir.read_config(), run_dir.read_facts()
    with Observer.connect(config, facts, "twin") as first, Observer.connect(config, facts, "twin") as second:
        assert second.status().step == 0
        with pytest.raises(QueueError, match="another one has said hello as twin"):
            first.status()


def test_a_broker_that_cannot_bind_ends_with_a_message(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, task={"name": "copy"})
    facts = run_dir.read_facts()
    run_dir.write_facts(facts.model_copy(update={"queue_endpoints": ("ipc:///no/such/folder/q",)}))
    with broker(run_dir) as process:
        assert process.stderr is not None
        assert process.wait(timeout=20) == 1
        assert b"listens at ipc:///no/such/folder/q, which cannot be bound" in process.stderr.read().splitlines()[-1]


def test_a_reply_that_is_of_another_kind_is_a_schema_error() -> None:
    from asyncrl.queue.connection import expect
    from asyncrl.queue.messages import Done, Status

    dialogue = Dialogue(endpoint="ipc:///q", run_id="r", sender="s", max_message_bytes=1)
    with pytest.raises(SchemaError, match="ipc:///q answers with Status; met Done"):
        expect(Status, Done(), dialogue)
