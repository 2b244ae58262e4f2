"""Publisher and receivers over real sockets and real shared memory; engines are five-line fakes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import EngineError, PeerTimeout, SyncError, VersionError
from asyncrl.sync.publisher import Publisher
from asyncrl.sync.receiver import Receiver
from asyncrl.sync.transports import open_update

ONE_RECEIVER = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_sync_publisher import Engine, receiver_of
from asyncrl.config.run_dir import RunFacts

async def main():
    facts = RunFacts.model_validate_json({facts!r})
    engine = Engine(load_s=600.0)
    print("up", flush=True)
    await receiver_of(facts, "doomed", engine).run()
asyncio.run(main())
"""


class Engine:
    """Keeps the first tensor of every version that it loads."""

    def __init__(self, load_s=0.0, fail=""):
        self.version, self.loaded, self.load_s, self.fail = -1, [], load_s, fail

    async def check(self, manifest):
        if self.fail:
            raise SyncError(self.fail)

    async def load(self, manifest):
        await asyncio.sleep(self.load_s)
        with open_update(manifest) as tensors:
            self.loaded.append((manifest.version, [torch.frombuffer(view, dtype=torch.float32)[0].item() for _, view in tensors]))
        self.version = manifest.version
        return 0.25


def facts_of(tmp_path, run_id="sync-test"):
    return RunFacts(
        run_id=f"{run_id}-{os.getpid()}",
        incarnation=0,
        queue_endpoints=(),
        sync_endpoint=f"ipc://{tmp_path}/sync",
        rendezvous="",
        model_dir="",
        generator_device="cpu",
        learner_device="cpu",
    )


def receiver_of(facts, name, engine, join_timeout_s=20.0):
    return Receiver(facts.sync_endpoint, facts.run_id, facts.incarnation, name, engine, join_timeout_s=join_timeout_s)


def tensors(value):
    return iter([("a", torch.full((300,), float(value))), ("b", torch.full((7,), float(value) + 0.5))])


@contextlib.contextmanager
def publishing(tmp_path, facts=None, **options):
    facts = facts or facts_of(tmp_path)
    publisher = Publisher(Config.model_validate(options), facts, RunDir(tmp_path))
    try:
        yield publisher, facts
    finally:
        publisher.close()
        assert not list(Path("/dev/shm").glob(f"asyncrl-{facts.run_id}.*")), "segments are left in shared memory"


async def until(condition, timeout_s=15.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def receiving(*receivers):
    tasks = [asyncio.create_task(receiver.run()) for receiver in receivers]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def test_a_joiner_gets_the_current_weights_and_then_every_publish(tmp_path):
    async def scene(publisher, facts):
        engine = Engine()
        receiver = receiver_of(facts, "g0", engine)
        async with receiving(receiver):
            await asyncio.wait_for(receiver.ready.wait(), 15)
            assert engine.loaded == [(0, [0.0, 0.5])]
            publisher.publish(1, tensors(1), {})
            await until(lambda: publisher.committed_versions == {"g0": 1})
            assert engine.loaded[-1] == (1, [1.0, 1.5])
            await until(lambda: publisher.last_sync_s > 0)
            assert publisher.last_sync_s < 15

    with publishing(tmp_path) as (publisher, facts):
        publisher.publish(0, tensors(0), {})
        asyncio.run(scene(publisher, facts))
        with pytest.raises(VersionError, match="met 1 after 1"):
            publisher.publish(1, tensors(2), {})


def test_publish_copies_so_that_the_learner_may_go_on_writing(tmp_path):
    async def scene(publisher, facts):
        engine = Engine()
        async with receiving(receiver_of(facts, "g0", engine)):
            await until(lambda: engine.loaded)
            assert engine.loaded == [(0, [1.0])]

    with publishing(tmp_path) as (publisher, facts):
        weight = torch.ones(5)
        publisher.publish(0, iter([("a", weight)]), {})
        weight += 41.0
        asyncio.run(scene(publisher, facts))


def test_while_one_loads_slowly_publishes_coalesce_to_the_newest(tmp_path):
    async def scene(publisher, facts):
        engine = Engine(load_s=0.4)
        async with receiving(receiver_of(facts, "g0", engine)):
            await until(lambda: publisher.committed_versions == {"g0": 0})
            for version in range(1, 6):
                publisher.publish(version, tensors(version), {})
            await until(lambda: engine.version == 5)
            assert [version for version, _ in engine.loaded] == [0, 1, 5]

    with publishing(tmp_path) as (publisher, facts):
        publisher.publish(0, tensors(0), {})
        asyncio.run(scene(publisher, facts))


def test_in_lockstep_no_version_is_skipped_and_each_waits_for_advance(tmp_path):
    async def scene(publisher, facts):
        engine = Engine()
        receiver = receiver_of(facts, "g0", engine)
        async with receiving(receiver):
            await until(lambda: engine.version == 0)
            publisher.publish(1, tensors(1), {})
            publisher.publish(2, tensors(2), {})
            await asyncio.sleep(0.3)
            assert engine.version == 0
            receiver.advance(0)
            await until(lambda: engine.version == 1)
            await asyncio.sleep(0.3)
            assert engine.version == 1
            receiver.advance(1)
            await until(lambda: engine.version == 2)

    options = {"queue": {"schedule": "lockstep", "max_staleness": 2}, "algorithm": {"no_signal": "keep"}}
    with publishing(tmp_path, **options) as (publisher, facts):
        publisher.publish(0, tensors(0), {})
        asyncio.run(scene(publisher, facts))


def test_in_lockstep_publish_waits_for_room_and_says_who_is_missing_when_none_comes(tmp_path):
    options = {
        "queue": {"schedule": "lockstep", "max_staleness": 0},
        "algorithm": {"no_signal": "keep"},
        "launch": {"stall_timeout_s": 0.3},
    }
    with publishing(tmp_path, **options) as (publisher, _):
        publisher.publish(0, tensors(0), {})
        publisher.publish(1, tensors(1), {})
        with pytest.raises(PeerTimeout, match=r"at most 1 snapshots waiting; 2 waited .* no receiver commits"):
            publisher.publish(2, tensors(2), {})


def test_a_receiver_that_refuses_an_update_is_quarantined_and_the_others_go_on(tmp_path):
    async def scene(publisher, facts):
        good, bad = Engine(), Engine(fail="lm_head.weight is missing")
        async with receiving(receiver_of(facts, "good", good), receiver_of(facts, "bad", bad)) as (_, bad_task):
            await until(lambda: good.version == 0 and "bad" in publisher.quarantined)
            assert "lm_head.weight is missing" in publisher.quarantined["bad"]
            publisher.publish(1, tensors(1), {})
            await until(lambda: good.version == 1)
            assert bad.version == -1
            with pytest.raises(SyncError, match=r"lm_head\.weight is missing"):
                await asyncio.wait_for(bad_task, 15)

    with publishing(tmp_path) as (publisher, facts):
        publisher.publish(0, tensors(0), {})
        asyncio.run(scene(publisher, facts))


def test_a_quarantined_receiver_that_recovers_gets_a_full_update_before_it_serves_again(tmp_path):
    async def scene(publisher, facts):
        engine = Engine()
        receiver = receiver_of(facts, "g0", engine)
        async with receiving(receiver):
            await until(lambda: engine.version == 0)
            engine.fail = "no memory"
            publisher.publish(1, tensors(1), {})
            await until(lambda: not receiver.ready.is_set())
            engine.fail = ""
            await asyncio.wait_for(receiver.ready.wait(), 15)
            assert engine.loaded[-1] == (1, [1.0, 1.5]) and publisher.quarantined == {}

    with publishing(tmp_path) as (publisher, facts):
        publisher.publish(0, tensors(0), {})
        asyncio.run(scene(publisher, facts))


def test_a_receiver_killed_in_mid_phase_is_quarantined_by_its_deadline_and_the_others_go_on(tmp_path):
    async def scene(publisher, facts):
        engine = Engine()
        async with receiving(receiver_of(facts, "alive", engine)):
            await until(lambda: engine.version == 0)
            code = ONE_RECEIVER.format(folder=str(Path(__file__).parent), facts=facts.model_dump_json())
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            await asyncio.to_thread(child.stdout.readline)
            await asyncio.sleep(0.5)
            child.send_signal(signal.SIGKILL)
            child.wait()
            publisher.publish(1, tensors(1), {})
            await until(lambda: engine.version == 1)
            await until(lambda: "doomed" in publisher.quarantined)
            assert publisher.committed_versions == {"alive": 1}

    with publishing(tmp_path, sync={"commit_timeout_s": 1.5}) as (publisher, facts):
        publisher.publish(0, tensors(0), {})
        asyncio.run(scene(publisher, facts))


def test_b39_an_unchanged_publish_is_counted_and_logged(tmp_path, caplog):
    with publishing(tmp_path) as (publisher, _):
        publisher.publish(0, tensors(3), {})
        publisher.publish(1, tensors(4), {})
        assert publisher.unchanged_publishes == 0
        with caplog.at_level(logging.ERROR):
            publisher.publish(2, tensors(4), {})
        assert publisher.unchanged_publishes == 1
        assert "version 2 has the checksums of the version before in all 2 tensors" in caplog.text


def test_a_generator_of_another_run_is_refused_and_times_out_with_the_endpoint(tmp_path):
    async def scene(facts):
        stranger = receiver_of(facts.model_copy(update={"run_id": "other"}), "g0", Engine(), join_timeout_s=1.0)
        with pytest.raises(PeerTimeout, match=f"publisher at {facts.sync_endpoint} sent no weights"):
            await asyncio.wait_for(stranger.run(), 15)

    with publishing(tmp_path) as (publisher, facts):
        publisher.publish(0, tensors(0), {})
        asyncio.run(scene(facts))
        assert publisher.committed_versions == {} and publisher._socket.refused_frames >= 1


def test_a_receiver_joins_the_publisher_that_takes_over_the_endpoint(tmp_path):
    async def scene(facts):
        engine = Engine()
        async with receiving(receiver_of(facts, "g0", engine)):
            with publishing(tmp_path, facts) as (first, _):
                first.publish(4, tensors(4), {})
                await until(lambda: engine.version == 4)
            with publishing(tmp_path, facts) as (second, _):
                second.publish(5, tensors(5), {})
                await until(lambda: second.committed_versions == {"g0": 5})

    asyncio.run(scene(facts_of(tmp_path)))


def test_an_engine_that_dies_under_an_update_ends_its_receiver(tmp_path):
    class Dying(Engine):
        async def load(self, manifest):
            raise EngineError("worker is gone")

    async def scene(publisher, facts):
        with pytest.raises(EngineError, match="worker is gone"):
            await asyncio.wait_for(receiver_of(facts, "g0", Dying()).run(), 15)
        await until(lambda: "worker is gone" in publisher.quarantined.get("g0", ""))

    with publishing(tmp_path) as (publisher, facts):
        publisher.publish(0, tensors(0), {})
        asyncio.run(scene(publisher, facts))


def test_bytes_that_are_no_message_change_nothing(tmp_path):
    import zmq

    with publishing(tmp_path) as (publisher, facts):
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.IDENTITY, b"g0")
            dealer.setsockopt(zmq.LINGER, 1000)
            dealer.connect(facts.sync_endpoint)
            for frames in ([b"\xff" * 50], [b"a", b"b"], [b""], [zlib.compress(b"x" * 999)]):
                dealer.send_multipart(frames)
            deadline_s = time.monotonic() + 10
            while publisher._socket.refused_frames < 4:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        publisher.publish(0, tensors(0), {})
        assert publisher.quarantined == {}


def test_a_second_publisher_on_the_endpoint_is_refused_with_its_name(tmp_path):
    with publishing(tmp_path, facts_of(tmp_path).model_copy(update={"sync_endpoint": "tcp://127.0.0.1:41873"})) as (_, facts):
        with pytest.raises(SyncError, match=r"cannot bind tcp://127\.0\.0\.1:41873"):
            Publisher(Config(), facts.model_copy(update={"run_id": "second"}), RunDir(tmp_path / "second"))
