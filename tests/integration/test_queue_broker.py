"""A real broker process, real sockets: two producers, one consumer, and what happens when one of them is killed."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from queue_run import broker, group_for, kill, new_run, python, wait_for

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import FencedError, PeerTimeout, VersionError
from asyncrl.launch.start import free_port
from asyncrl.queue.client import Consumer, Observer, Producer
from asyncrl.queue.shm import SHM_FOLDER

pytestmark = pytest.mark.real


def clients(run_dir: RunDir) -> tuple[Consumer, Observer]:
    config, facts = run_dir.read_config(), run_dir.read_facts()
    return Consumer.connect(config, facts, "learner-0"), Observer.connect(config, facts, "driver")


async def produce(run_dir: RunDir, name: str, until_step: int) -> int:
    """Samples for the newest committed step until it is reached; returns the groups that were accepted."""
    config, facts = run_dir.read_config(), run_dir.read_facts()
    producer = await Producer.connect(config, facts, name)
    accepted, version = 0, 0
    observer = await asyncio.to_thread(Observer.connect, config, facts, f"watch-{name}")
    while version < until_step:
        version = max(version, (await asyncio.to_thread(observer.status)).step)
        tickets = await producer.tickets(version, 2, wait_s=0.2)
        outcomes = await producer.put([group_for(t, version, generator=name) for t in tickets.tickets])
        accepted += outcomes.count("accepted")
        await producer.heartbeat(version, {version: 5}, accepted * 6)
    await producer.close()
    observer.close()
    return accepted


def train(consumer: Consumer, steps: int) -> list[int]:
    trained = []
    for step in range(steps):
        lease = consumer.lease(step, wait_s=2.0)
        deadline_s = time.monotonic() + 20
        while not lease.groups:
            assert time.monotonic() < deadline_s, lease.blocked
            lease = consumer.lease(step, wait_s=2.0)
        tickets = [meta.ticket for meta in lease.groups]
        groups, damaged = consumer.fetch(lease.groups)
        assert list(groups) == tickets and not damaged
        assert all(np.array_equal(t.input_ids, np.arange(5)) for group in groups.values() for t in group.trajectories)
        status = consumer.commit(step).status
        assert status.admitted == status.trained + sum(status.dropped.values()) + status.in_flight
        assert max(status.lag.consumed) <= 1 and sum(status.lag.consumed.values()) == 4 * 2 * 3
        trained += tickets
    return trained


async def together(run_dir: RunDir, consumer: Consumer) -> tuple[list[int], list[int]]:
    producers = [produce(run_dir, f"generator-{i}", until_step=5) for i in range(2)]
    results = await asyncio.gather(asyncio.to_thread(train, consumer, 5), *producers)
    return results[0], list(results[1:])


def test_two_producers_feed_one_learner_and_every_ticket_is_trained_once(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 4}, queue={"max_staleness": 1})
    with broker(run_dir) as process:
        consumer, observer = clients(run_dir)
        trained, accepted = asyncio.run(together(run_dir, consumer))
        assert trained == list(range(20))
        assert all(number > 0 for number in accepted) and sum(accepted) >= 20
        status = observer.status()
        assert status.step == 5 and status.trained == 20
        assert status.generator_tokens == 6 * sum(accepted)
        assert status.rewards_sum / status.rewards_count == 0.5
        observer.stop(exit=True)
        assert process.wait(timeout=3) == 0
        consumer.close()
        observer.close()


DYING_PRODUCER = """
import asyncio, sys
from queue_run import RunDir
from asyncrl.queue.client import Producer

async def main():
    run_dir = RunDir(sys.argv[1])
    producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-1")
    tickets = await producer.tickets(0, 3, wait_s=1.0)
    print(len(tickets.tickets), file=sys.stderr, flush=True)
    while True:
        await producer.heartbeat(0, {}, 0)
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


def test_tickets_of_a_killed_producer_process_are_issued_to_the_other(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 4}, queue={"max_staleness": 1, "dead_after_s": 1.5})
    with broker(run_dir):
        consumer, observer = clients(run_dir)
        dying = python("-c", DYING_PRODUCER, str(run_dir.path))
        assert dying.stderr is not None and dying.stderr.readline() == b"3\n"
        kill(dying)
        # nobody told the queue: it notices the silence
        wait_for(lambda: "generator-1" not in observer.status().producers, timeout_s=4)
        trained, _accepted = asyncio.run(together(run_dir, consumer))
        assert trained == list(range(20))
        assert observer.status().reissued == 3
        consumer.close()
        observer.close()


DYING_KEEPER = """
import asyncio, sys
from queue_run import RunDir, group_for
from asyncrl.queue.client import Producer

async def main():
    run_dir = RunDir(sys.argv[1])
    producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-1")
    tickets = await producer.tickets(0, 3, wait_s=1.0)
    print(await producer.put([group_for(t, 0, generator="generator-1") for t in tickets.tickets]), file=sys.stderr, flush=True)
    while True:
        await producer.heartbeat(0, {}, 0)
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


FORGETFUL = """
import asyncio, gc, sys
from queue_run import RunDir
from asyncrl.queue.client import Producer

async def main(run_dir):
    producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-0")
    await producer.heartbeat(0, {}, 0)

for _ in range(3):
    asyncio.run(main(RunDir(sys.argv[1])))
    gc.collect()
"""


def test_producers_that_nobody_closed_are_collected_and_block_nothing(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path)
    with broker(run_dir):
        forgetful = python("-c", FORGETFUL, str(run_dir.path))
        try:
            assert forgetful.wait(timeout=30) == 0
        finally:
            kill(forgetful)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_payload_goes_straight_from_producer_to_learner_and_dies_with_its_producer(tmp_path: Path, transport: str) -> None:
    queue = {"max_staleness": 1, "dead_after_s": 1.5, "payload": "direct", "durability": "memory", "transport": transport}
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 4}, queue=queue)
    if transport == "tcp":
        endpoints = (f"tcp://127.0.0.1:{free_port()}",)
        run_dir.write_facts(run_dir.read_facts().model_copy(update={"queue_endpoints": endpoints}))
    with broker(run_dir):
        consumer, observer = clients(run_dir)
        keeper = python("-c", DYING_KEEPER, str(run_dir.path))
        assert keeper.stderr is not None and keeper.stderr.readline() == b"['accepted', 'accepted', 'accepted']\n"
        assert observer.status().queued_groups == 3
        kill(keeper)
        wait_for(lambda: observer.status().queued_groups == 0, timeout_s=4)
        trained, _accepted = asyncio.run(together(run_dir, consumer))
        assert trained == list(range(20))
        assert observer.status().reissued == 3
        consumer.close()
        observer.close()


def test_what_an_answer_releases_that_nobody_waits_for_is_released_all_the_same(tmp_path: Path) -> None:
    queue = {"max_staleness": 4, "payload": "direct", "durability": "memory"}
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 2}, queue=queue)

    async def scene(consumer: Consumer) -> int:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-0")
        tickets = (await producer.tickets(0, 3, wait_s=1.0)).tickets
        await producer.put([group_for(ticket, 0) for ticket in tickets[:2]])
        consumer.lease(0, wait_s=1.0)
        consumer.commit(0)
        put = asyncio.create_task(producer.put([group_for(tickets[2], 0)]))
        await asyncio.sleep(0)  # it is sent
        put.cancel()
        await asyncio.wait([put])
        await producer.heartbeat(0, {}, 0)
        used = producer._arena.num_used
        consumer.close()
        await producer.close()
        return used

    with broker(run_dir):
        consumer, observer = clients(run_dir)
        assert asyncio.run(scene(consumer)) == 1
        assert observer.status().queued_groups == 1
        observer.close()


def test_a_leased_group_whose_producer_is_gone_is_returned_and_sampled_again(tmp_path: Path) -> None:
    queue = {"max_staleness": 1, "dead_after_s": 1.0, "payload": "direct", "durability": "memory"}
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 3}, queue=queue)
    with broker(run_dir):
        consumer, observer = clients(run_dir)
        keeper = python("-c", DYING_KEEPER, str(run_dir.path))
        assert keeper.stderr is not None and keeper.stderr.readline()
        lease = consumer.lease(0, wait_s=2.0)
        kill(keeper)
        groups, damaged = consumer.fetch(lease.groups)
        assert not groups and [ticket for ticket, _, _ in damaged] == [0, 1, 2]
        assert all("answer" in reason for _, _, reason in damaged)
        consumer.return_(0, damaged)
        status = observer.status()
        assert (status.leased, status.queued_groups, status.in_flight) == (0, 0, 3)
        consumer.close()
        observer.close()


def test_b51_a_waiting_learner_is_told_of_a_dead_producer_and_its_error_within_a_heartbeat(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 2}, queue={"dead_after_s": 30.0}, generator={"start_timeout_s": 1.0})

    async def scene(consumer: Consumer, observer: Observer) -> tuple[str, float]:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-0")
        ticket = (await producer.tickets(0, 1, wait_s=1.0)).tickets[0]
        waiting = asyncio.create_task(asyncio.to_thread(consumer.lease, 0, 20.0))
        await asyncio.sleep(0.3)
        await producer.fail(ticket.ticket, ticket.attempt, "the task raised ZeroDivisionError")
        await producer.close()
        died_s = time.monotonic()
        await asyncio.to_thread(observer.producer_gone, "generator-0")
        lease = await waiting
        return lease.blocked, time.monotonic() - died_s

    with broker(run_dir):
        consumer, observer = clients(run_dir)
        blocked, took_s = asyncio.run(scene(consumer, observer))
        assert "no producer is alive; generator-0" in blocked and "ZeroDivisionError" in blocked
        assert took_s < 1.0
        time.sleep(1.2)
        # and none came back within generator.start_timeout_s
        with pytest.raises(Exception, match="none has come back") as caught:
            consumer.lease(0, wait_s=0.5)
        assert type(caught.value).__name__ == "ProcessDied"
        consumer.close()
        observer.close()


def test_b51_clients_of_a_killed_broker_give_up_and_name_the_endpoint(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, queue={"dead_after_s": 1.0})

    async def heartbeat_until_refused() -> float:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-0")
        kill(process)
        started_s = time.monotonic()
        with pytest.raises(PeerTimeout, match="ipc://"):
            await producer.heartbeat(0, {}, 0)
        await producer.close()
        return time.monotonic() - started_s

    with broker(run_dir) as process:
        consumer, observer = clients(run_dir)
        assert asyncio.run(heartbeat_until_refused()) < 2.0
        with pytest.raises(PeerTimeout, match=str(tmp_path)):
            consumer.commit(0)
        consumer.close()
        observer.close()


def test_b53_five_prompts_in_batches_of_four_with_a_queue_of_one_end_in_two_seconds(tmp_path: Path) -> None:
    run_dir = new_run(
        tmp_path, algorithm={"groups_per_step": 4}, queue={"max_queued_groups": 1, "max_staleness": 1}, task={"size": 5, "epochs": 1}
    )

    async def all_prompts() -> int:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-0")
        number = 0
        while number < 5:
            tickets = await producer.tickets(0, 4, wait_s=0.2)
            for ticket in tickets.tickets:
                await producer.put([group_for(ticket, 0)])
                number += 1
        await producer.close()
        return number

    def learn(consumer: Consumer) -> list[int]:
        sizes = []
        while True:
            lease = consumer.lease(len(sizes), wait_s=0.2)
            if lease.ended:
                return sizes
            if lease.groups:
                consumer.commit(len(sizes))
                sizes.append(len(lease.groups))

    async def run(consumer: Consumer) -> list[int]:
        learner = asyncio.create_task(asyncio.to_thread(learn, consumer))
        await all_prompts()
        return await learner

    with broker(run_dir) as process:
        consumer, observer = clients(run_dir)
        started_s = time.monotonic()
        assert asyncio.run(run(consumer)) == [4, 1]
        observer.stop(exit=True)
        assert process.wait(timeout=2) == 0
        assert time.monotonic() - started_s < 2.0
        consumer.close()
        observer.close()


def test_b31_a_producer_whose_version_falls_is_refused_with_a_version_error(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 1}, queue={"max_staleness": 4})

    async def scene(consumer: Consumer) -> None:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-0")
        for step in range(2):
            ticket = (await producer.tickets(step, 1, wait_s=1.0)).tickets[0]
            assert await producer.put([group_for(ticket, step)]) == ["accepted"]
            assert consumer.lease(step, wait_s=1.0).groups[0].oldest_version == step
            consumer.commit(step)
        with pytest.raises(VersionError, match="generator-0 said 1, now 0"):
            await producer.tickets(0, 1, wait_s=0.1)
        with pytest.raises(VersionError, match="of which 2 are committed; generator-0 said 3"):
            await producer.tickets(3, 1, wait_s=0.1)
        # the conversation goes on after a refusal
        assert len((await producer.tickets(2, 1, wait_s=0.1)).tickets) == 1
        await producer.close()

    with broker(run_dir):
        consumer, observer = clients(run_dir)
        asyncio.run(scene(consumer))
        assert observer.status().refused == {"VersionError": 1}, "the one that fell was not sent"
        consumer.close()
        observer.close()


def test_an_older_learner_is_fenced_and_its_lease_comes_back(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 1})
    config, facts = run_dir.read_config(), run_dir.read_facts()

    async def one_group() -> None:
        producer = await Producer.connect(config, facts, "generator-0")
        ticket = (await producer.tickets(0, 1, wait_s=1.0)).tickets[0]
        await producer.put([group_for(ticket, 0)])
        await producer.close()

    with broker(run_dir):
        old, observer = clients(run_dir)
        asyncio.run(one_group())
        assert [meta.ticket for meta in old.lease(0, wait_s=1.0).groups] == [0]
        new = Consumer.connect(config, facts.model_copy(update={"incarnation": 1}), "learner-0b")
        assert observer.status().leased == 0
        with pytest.raises(FencedError, match="incarnation 1 has taken over"):
            old.commit(0)
        assert [meta.ticket for meta in new.lease(0, wait_s=1.0).groups] == [0]
        new.commit(0)
        for client in (old, new, observer):
            client.close()


def test_a_request_that_waited_for_a_dead_broker_is_asked_anew_with_the_newest_version(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 1}, queue={"max_staleness": 0, "dead_after_s": 10.0})
    config, facts = run_dir.read_config(), run_dir.read_facts()

    async def scene() -> list[int]:
        with broker(run_dir) as first:
            producer = await Producer.connect(config, facts, "generator-0")
            (ticket,) = (await producer.tickets(0, 1, wait_s=2.0)).tickets
            assert await producer.put([group_for(ticket, 0)]) == ["accepted"]
            await asyncio.to_thread(_train_one, run_dir)
            waits = asyncio.create_task(producer.tickets(0, 1, wait_s=2.0))
            await asyncio.sleep(0.3)
            kill(first)
            beats = asyncio.create_task(producer.heartbeat(1, {}, 3))
            await asyncio.sleep(0.3)
        with broker(run_dir):
            await beats
            answer = await waits
            await producer.close()
            return [ticket.not_before_version for ticket in answer.tickets]

    assert asyncio.run(scene()) == [1]


def _train_one(run_dir: RunDir) -> None:
    with Consumer.connect(run_dir.read_config(), run_dir.read_facts(), "learner-0") as consumer:
        assert consumer.lease(0, wait_s=2.0).groups
        consumer.commit(0)


def test_a_request_that_lost_its_turn_says_the_newest_version_and_a_caller_that_goes_back_is_told(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, algorithm={"groups_per_step": 1}, queue={"max_staleness": 0})

    async def scene() -> None:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), "generator-0")
        (ticket,) = (await producer.tickets(0, 1, wait_s=2.0)).tickets
        assert await producer.put([group_for(ticket, 0)]) == ["accepted"]
        await asyncio.to_thread(_train_one, run_dir)
        await producer.heartbeat(1, {}, 3)
        # what Producer.tickets(0) does when the heartbeat overtook it between two shards
        (later,) = (await producer._links[0].tickets(0, 1, wait_s=2.0)).tickets
        assert later.not_before_version == 1
        with pytest.raises(VersionError, match="said 1, now 0"):
            await producer.tickets(0, 1, wait_s=0.0)
        with pytest.raises(VersionError, match="7"):
            await producer.heartbeat(7, {}, 3)
        await producer.heartbeat(1, {}, 3)
        await producer.close()

    with broker(run_dir):
        asyncio.run(scene())


def test_a_broker_to_whom_nobody_speaks_ends_by_itself_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, queue={"dead_after_s": 1.0}, generator={"start_timeout_s": 1.0})
    left = SHM_FOLDER / f"asyncrl-{run_dir.read_facts().run_id}.q.generator-0.0"
    process = python("-m", "asyncrl.queue", str(run_dir.path))
    try:
        wait_for(lambda: (run_dir.queue / "shard-0").exists() or process.poll() is not None)
        left.write_bytes(b"of a producer that is gone")
        assert process.wait(timeout=30) == 1
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)
        kill(process)


def test_a_client_may_give_a_silent_broker_less_time_than_the_run_does(tmp_path: Path) -> None:
    run_dir = new_run(tmp_path, queue={"dead_after_s": 30.0})
    with broker(run_dir) as process, Observer.connect(run_dir.read_config(), run_dir.read_facts(), "driver", answer_s=0.5) as observer:
        assert observer.status().step == 0
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerTimeout, match=r"within 0\.5 s"):
            observer.status()
        process.send_signal(signal.SIGCONT)
