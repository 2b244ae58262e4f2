"""A generator process put together: engine, receiver, queue client, rollout loop; started and ended in that order.

Source: design note, sections 1 and 6.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from typing import Any

from asyncrl.config import Config
from asyncrl.config.run_dir import RunFacts
from asyncrl.errors import PeerTimeout
from asyncrl.generators.engine import GeneratorEngine, new_engine
from asyncrl.generators.groups import GroupSampler
from asyncrl.generators.rollout import Rollout
from asyncrl.generators.scoring import Scorer
from asyncrl.queue.client import Producer
from asyncrl.sync.receiver import Receiver
from asyncrl.tasks import new_reward

__all__ = ["configure_logging", "generate"]

log = logging.getLogger(__name__)
LOG_EVERY_S = 10.0
CLOSE_TIMEOUT_S = 5.0


def configure_logging(name: str, level: str) -> None:
    """Every line on stderr with time, process, version and source; :func:`generate` keeps the version current."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format=f"%(asctime)s %(levelname)s {name} v%(version)s %(name)s: %(message)s"
    )
    stamp_version(None)


def stamp_version(engine: GeneratorEngine | None) -> None:
    """Puts the committed version of an engine (``-``: none yet) into every record from now on."""
    factory = logging.LogRecord

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = factory(*args, **kwargs)
        made.version = "-" if engine is None or engine.version < 0 else engine.version
        return made

    logging.setLogRecordFactory(record)


async def generate(config: Config, facts: RunFacts, name: str) -> None:
    """Runs one generator until the queue stops, SIGTERM comes, or something fails.

    Raises:
        AsyncRLError: why it cannot go on; every process under it is ended before.
    """
    reward = new_reward(config)
    engine = new_engine(config, facts.model_dir)
    stamp_version(engine)
    try:
        await engine.start()
        await _serve(config, facts, name, engine, GroupSampler(
            config, engine, Scorer(reward, config.task.reward_timeout_s), name, facts.incarnation,
            sequential=config.queue.schedule == "lockstep" and not engine.batch_invariant,
        ))  # fmt: skip
    finally:
        try:
            await asyncio.wait_for(engine.close(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            log.warning("the engine was not closed within %.0f s: its processes are left to the reaper", CLOSE_TIMEOUT_S)


async def _serve(config: Config, facts: RunFacts, name: str, engine: GeneratorEngine, sampler: GroupSampler) -> None:
    timeout_s = config.generator.start_timeout_s
    receiver = Receiver(facts.sync_endpoint, facts.run_id, facts.incarnation, name, engine, join_timeout_s=timeout_s)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    receiving = asyncio.create_task(receiver.run(), name="receiver")
    try:
        if not await _first_weights(receiver, receiving, stop, timeout_s, facts.sync_endpoint):
            return
        producer = await Producer.connect(config, facts, name)
        try:
            rollout = Rollout(config, engine, receiver, producer, sampler)
            stopper = asyncio.create_task(_stop_when(stop, rollout), name="stopper")
            await rollout.run(receiving)
            stopper.cancel()
        finally:
            await producer.close()
    finally:
        receiving.cancel()
        await asyncio.wait([receiving], timeout=CLOSE_TIMEOUT_S)


async def _first_weights(receiver: Receiver, receiving: asyncio.Task[None], stop: asyncio.Event, timeout_s: float, endpoint: str) -> bool:
    """Waits for the first committed version; False when it was told to stop before."""
    started_s = time.monotonic()
    waits = [asyncio.create_task(receiver.ready.wait()), asyncio.create_task(stop.wait())]
    try:
        while not receiver.ready.is_set() and not stop.is_set():
            waited_s = time.monotonic() - started_s
            if waited_s > timeout_s:
                raise PeerTimeout(
                    f"no full weights from the publisher at {endpoint} within {timeout_s:.0f} s of joining", endpoint=endpoint
                )
            if waited_s > LOG_EVERY_S:
                log.info("waiting for the first weights from %s since %.0f s", endpoint, waited_s)
            await asyncio.wait([*waits, receiving], timeout=LOG_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
        return not stop.is_set()
    finally:
        for wait in waits:
            wait.cancel()


async def _stop_when(stop: asyncio.Event, rollout: Rollout) -> None:
    await stop.wait()
    log.info("asked to stop")
    rollout.stop()
