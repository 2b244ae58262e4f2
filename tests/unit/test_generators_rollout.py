"""The rollout loop against a scripted queue: room, order, ends and failures."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from asyncrl.config import Config
from asyncrl.errors import DataError, EngineError, PeerTimeout, QueueError
from asyncrl.generators.groups import UnusablePromptError
from asyncrl.generators.rollout import Rollout
from asyncrl.queue.messages import Ticket, Tickets


def ticket(number):
    return Ticket(
        ticket=number, group_id=f"g{number}", attempt=0, prompt_id="p", prompt="", is_chat=False, answer="", extra="", seed=0,
        deadline_s=0.0, not_before_version=0,
    )  # fmt: skip


class Queue:
    """Hands out scripted replies, then what ``last`` is; notes what comes back."""

    def __init__(self, replies, last=None):
        self.replies, self.last = list(replies), last or Tickets(tickets=(), stopping=True)
        self.asked, self.put_tickets, self.failed, self.beats = [], [], [], []
        self.settled_at_beat = 0

    async def tickets(self, version, n, wait_s):
        self.asked.append((version, n))
        await asyncio.sleep(0.01)
        reply = self.replies.pop(0) if self.replies else self.last
        return reply(n) if callable(reply) else reply

    async def put(self, groups):
        self.put_tickets += [group.ticket for group in groups]
        return ["accepted"] * len(groups)

    async def fail(self, number, attempt, reason, final=False):
        self.failed.append((number, reason, final))

    async def heartbeat(self, version, in_flight, sampled_tokens):
        self.beats.append((version, in_flight, sampled_tokens))

    async def settled(self, stall_s):
        assert stall_s == Config().launch.stall_timeout_s
        while len(self.beats) < self.settled_at_beat:
            await asyncio.sleep(0.01)


class Engine:
    name, logprobs_mode, batch_invariant, version = "fake", "processed", False, 0

    def in_flight_tokens(self):
        return {0: 3}


class Receiver:
    def __init__(self, engine=None):
        self.ready, self.committed, self.advanced, self.engine = asyncio.Event(), asyncio.Event(), [], engine
        self.ready.set()

    def advance(self, version):
        self.advanced.append(version)
        if self.engine is not None:
            self.engine.version = version + 1
            self.committed.set()


class Sampler:
    sampled_tokens = 5

    def __init__(self, seconds=0.0, error=None):
        self.seconds, self.error, self.running, self.most, self.log = seconds, error, 0, 0, []

    async def sample(self, ticket):
        self.running += 1
        self.most = max(self.most, self.running)
        self.log.append(("start", ticket.ticket))
        try:
            await asyncio.sleep(self.seconds)
            if self.error is not None:
                raise self.error
        finally:
            self.running -= 1
        self.log.append(("end", ticket.ticket))
        return SimpleNamespace(ticket=ticket.ticket)


def run(tickets, sampler=None, *, engine=None, receiver=None, during=None, receiving_error=None, timeout_s=10.0, **options):
    async def scene():
        chosen = engine or Engine()
        rollout = Rollout(Config.model_validate(options), chosen, receiver or Receiver(), tickets, sampler or Sampler())

        async def receive():
            if receiving_error is not None:
                raise receiving_error
            await asyncio.sleep(3600)

        receiving = asyncio.create_task(receive())
        task = asyncio.create_task(rollout.run(receiving))
        if during is not None:
            await during(rollout)
        try:
            await asyncio.wait_for(task, timeout_s)
        finally:
            receiving.cancel()

    asyncio.run(scene())


def give(*numbers):
    return Tickets(tickets=tuple(ticket(number) for number in numbers))


async def a_while(rollout):
    await asyncio.sleep(0.3)
    rollout.stop()


def test_groups_are_put_as_they_end_and_no_more_than_fit_are_asked_for():
    numbers = iter(range(100))
    queue = Queue([], last=lambda n: give(*(next(numbers) for _ in range(n))))
    sampler = Sampler(seconds=0.05)
    run(queue, sampler, during=a_while, generator={"max_groups": 3})
    assert sampler.most == 3
    assert queue.put_tickets[:3] == [0, 1, 2] and len(queue.put_tickets) >= 6
    assert queue.asked[0] == (0, 3) and all(1 <= n <= 3 for _, n in queue.asked)


def test_it_ends_by_itself_when_the_queue_is_stopping():
    queue = Queue([Tickets(tickets=(), blocked="gate shut")])
    run(queue)
    assert len(queue.asked) == 2 and queue.failed == []


def test_it_lives_on_with_heartbeats_until_nobody_needs_what_stayed_with_it():
    queue = Queue([])
    queue.settled_at_beat = 3
    run(queue, queue={"heartbeat_s": 0.05})
    assert len(queue.asked) == 1 and len(queue.beats) >= 3


def test_told_to_stop_it_ends_at_once_and_gives_running_groups_back():
    queue = Queue([give(4, 5)], last=Tickets(tickets=(), blocked="none"))
    started_s = time.monotonic()
    run(queue, Sampler(seconds=60.0), during=a_while)
    assert time.monotonic() - started_s < 3.0
    assert sorted(queue.failed) == [(4, "its generator was stopped", False), (5, "its generator was stopped", False)]


def test_a_prompt_that_nobody_can_sample_is_failed_for_good_and_another_failure_is_given_back():
    for error, final in ((UnusablePromptError("too long"), True), (DataError("1 of 4 siblings are left"), False)):
        queue = Queue([give(4)], last=Tickets(tickets=(), blocked="none"))
        run(queue, Sampler(error=error), during=a_while)
        assert queue.failed == [(4, str(error), final)] and queue.put_tickets == []


def test_a_group_that_is_not_done_by_its_deadline_is_given_back():
    queue = Queue([give(4)], last=Tickets(tickets=(), blocked="none"))
    run(queue, Sampler(seconds=60.0), during=a_while, queue={"ticket_deadline_s": 0.05})
    assert queue.failed == [(4, "not finished within queue.ticket_deadline_s=0.05", False)]


def test_a_group_too_large_for_a_message_is_failed_for_good_and_the_loop_goes_on():
    class Small(Queue):
        async def put(self, groups):
            raise QueueError("a message has at most 1 MiB")

    queue = Small([give(4), give(5)], last=Tickets(tickets=(), blocked="none"))
    run(queue, during=a_while)
    assert queue.failed == [(4, "a message has at most 1 MiB", True), (5, "a message has at most 1 MiB", True)]


def test_b51_an_engine_that_dies_ends_the_loop_with_its_error():
    with pytest.raises(EngineError, match="worker is gone"):
        run(Queue([give(4)], last=Tickets(tickets=(), blocked="none")), Sampler(error=EngineError("worker is gone")))


def test_b51_an_engine_that_dies_while_idle_is_noticed_within_a_heartbeat():
    class Dead(Engine):
        def in_flight_tokens(self):
            raise EngineError("process has died")

    with pytest.raises(EngineError, match="process has died"):
        run(Queue([], last=Tickets(tickets=(), blocked="none")), engine=Dead(), timeout_s=3.0)


def test_b51_a_receiver_that_ends_ends_the_loop_with_its_error():
    with pytest.raises(PeerTimeout, match="publisher is gone"):
        run(Queue([], last=Tickets(tickets=(), blocked="none")), receiving_error=PeerTimeout("publisher is gone"))


def test_no_ticket_is_asked_for_before_a_full_update_is_committed():
    receiver = Receiver()
    receiver.ready.clear()
    queue = Queue([], last=Tickets(tickets=(), blocked="none"))
    run(queue, receiver=receiver, during=a_while)
    assert queue.asked == []


def test_a_heartbeat_follows_every_commit_at_once():
    engine, receiver = Engine(), Receiver()

    async def commit(rollout):
        await asyncio.sleep(0.1)
        engine.version = 1
        receiver.committed.set()
        await asyncio.sleep(0.1)
        rollout.stop()

    queue = Queue([], last=Tickets(tickets=(), blocked="none"))
    run(queue, engine=engine, receiver=receiver, during=commit, queue={"heartbeat_s": 60.0, "dead_after_s": 300.0})
    assert queue.beats == [(0, {0: 3}, 5), (1, {0: 3}, 5)]


LOCKSTEP = {"queue": {"schedule": "lockstep"}, "algorithm": {"no_signal": "keep"}}


def test_in_lockstep_tickets_are_sampled_one_after_another_in_the_order_given():
    queue = Queue([give(0), give(1), give(2)])
    sampler = Sampler(seconds=0.03)
    run(queue, sampler, during=lambda rollout: asyncio.sleep(0), **LOCKSTEP)
    assert all(n == 1 for _, n in queue.asked)
    assert sampler.log == [("start", 0), ("end", 0), ("start", 1), ("end", 1), ("start", 2), ("end", 2)]


def test_in_lockstep_the_held_update_commits_only_when_the_queue_says_that_the_version_is_done_with():
    engine = Engine()
    receiver = Receiver(engine)
    queue = Queue([give(0), Tickets(tickets=(), blocked="waiting"), Tickets(tickets=(), advance=True), give(1)])
    run(queue, Sampler(seconds=0.02), engine=engine, receiver=receiver, **LOCKSTEP)
    assert receiver.advanced == [0]
    assert [version for version, _ in queue.asked] == [0, 0, 0, 1, 1]


def test_while_it_waits_for_a_held_update_it_still_hears_that_the_queue_is_stopping():
    queue = Queue([Tickets(tickets=(), advance=True)])
    run(queue, receiver=Receiver(), timeout_s=5.0, **LOCKSTEP)
    assert len(queue.asked) == 2


def test_b01_an_engine_that_does_not_declare_tempered_log_probs_is_refused():
    class Raw(Engine):
        logprobs_mode = "raw"

    with pytest.raises(EngineError, match="temperature inside the softmax; engine fake declares 'raw'"):
        run(Queue([]), engine=Raw())
