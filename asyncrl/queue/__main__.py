"""The queue as a process of its own: ``python -m asyncrl.queue RUN_DIR``.

Reads the run directory, takes over what an earlier process left, or takes it back to the checkpoint that the run starts
from, and serves until SIGTERM or a stop with ``exit``. On a full disk it begins once there is room. Exit code 0 in order; otherwise
the last log line says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

import msgspec

from asyncrl.config.run_dir import RunDir, RunFacts, write_atomic
from asyncrl.errors import AsyncRLError, DataError
from asyncrl.queue.broker import Broker
from asyncrl.queue.heap import keep_pages
from asyncrl.queue.messages import Frontier
from asyncrl.queue.opening import Opened, open_queue, when_there_is_room
from asyncrl.queue.prompts import TicketPrompts
from asyncrl.queue.service import QueueService
from asyncrl.queue.settings import GateSettings
from asyncrl.tasks import new_source

log = logging.getLogger("asyncrl.queue")
COLLECT_EVERY = 20_000


def main(arguments: list[str] | None = None) -> int:
    """Runs a broker of a run directory; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.queue", description="The versioned queue of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--shard", type=int, default=0, help="which of queue.shards brokers")
    parser.add_argument("--patient", action="store_true", help="serve on however long nobody speaks to it, also after a stop")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s queue %(levelname)s %(message)s")
    keep_pages()
    _leave_on_signal()
    try:
        broker = new_broker(RunDir(options.run_dir), options.shard, patient=options.patient)
        _end_on_signal(broker)
        _leave_alone_what_lives_on()
        return broker.run()
    except AsyncRLError as error:
        log.error("the queue ends: %s", error)
        return 1


def restored_frontier(facts: RunFacts) -> Frontier | None:
    """The frontier in the manifest of the checkpoint that the run starts from; None for a fresh run.

    Raises:
        DataError: the manifest is missing or holds no frontier.
    """
    if not facts.checkpoint:
        return None
    manifest = Path(facts.checkpoint) / "manifest.json"
    try:
        return msgspec.convert(json.loads(manifest.read_text())["frontier"], Frontier)
    except (OSError, KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise DataError(f"a checkpoint has a manifest.json with the queue's frontier; {manifest}: {error!r}") from error


def new_broker(run_dir: RunDir, shard: int = 0, *, patient: bool = False) -> Broker:
    """A broker over what its run directory holds, listening; a ``patient`` one was started by a user, whom an earlier stop does not bind.

    Raises:
        AsyncRLError: the directory is damaged or in use, or the endpoint cannot be bound.
    """
    config, facts = run_dir.read_config(), run_dir.read_facts()
    logging.getLogger().setLevel(config.monitor.log_level.upper())
    source = new_source(config)
    if source.bad_rows and shard == 0:
        log.warning("%d rows of %s cannot be used; they are listed in %s", len(source.bad_rows), config.task.path, run_dir.bad_rows)
    settings, frontier = GateSettings.from_config(config, source.size, shard), restored_frontier(facts)

    def opening() -> Opened:
        if source.bad_rows and shard == 0:
            write_atomic(run_dir.bad_rows, "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in source.bad_rows))
        return open_queue(run_dir, config, facts, settings, frontier)

    opened = when_there_is_room(opening)
    if patient:
        opened.gate.go_on()
    service = QueueService(opened, TicketPrompts(source, config.task.seed, config.queue.ticket_deadline_s), run_dir, facts.incarnation)
    endpoint = facts.queue_endpoints[shard]
    try:
        broker = Broker(config, facts, service, endpoint, patient=patient)
    except AsyncRLError:
        service.close()
        raise
    log.info("listening at %s, incarnation %d, from step %d", endpoint, facts.incarnation, opened.gate.frontier().steps)
    return broker


def _leave_alone_what_lives_on() -> None:
    """Modules and configuration are garbage at the end alone: without them a collection takes a millisecond and not a hundred."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY)


def _leave_on_signal() -> None:
    """Until there is a broker that ends in order."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)


def _end_on_signal(broker: Broker) -> None:
    def end(number: int, frame: FrameType | None) -> None:
        broker.ending = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


if __name__ == "__main__":
    sys.exit(main())
