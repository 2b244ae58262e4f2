"""Producer and consumer of a measured cell: ``python -m benchmarks.queue_ends ROLE RUN_DIR TRAJECTORY_MB``.

Each reads one line a step from its parent, does its part of the step against the real broker, and answers with a line of bytes.
The producer encodes one group and puts it under every ticket; what is measured is the way of its payload. Inside: the checksum at
both ends, metadata, tickets, leases, commits, and what the broker writes; each step is checkpointed, so that the log writes its files
anew. Outside: encoding, Arrow's validation, decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import DataError
from asyncrl.queue.client import Producer
from asyncrl.queue.consumer import Consumer
from asyncrl.queue.heap import keep_pages
from asyncrl.trajectory import GroupMeta, encode_group_frames
from benchmarks.groups import NUM_TRAJECTORIES, make_group, token_bytes

WAIT_S = 60.0


async def produce(run_dir: RunDir, trajectory_mb: float) -> None:
    """Puts a batch of groups for every line."""
    config = run_dir.read_config()
    producer = await Producer.connect(config, run_dir.read_facts(), "generator-0")
    group = make_group(NUM_TRAJECTORIES, trajectory_mb)
    num_bytes, frames = token_bytes(group), encode_group_frames(group)
    meta = group.meta(payload_bytes=sum(memoryview(frame).nbytes for frame in frames))
    del group
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        wanted = config.algorithm.groups_per_step
        while wanted:
            tickets = (await producer.tickets(0, wanted, WAIT_S)).tickets
            metas = [replace(meta, ticket=ticket.ticket, attempt=ticket.attempt, group_id=ticket.group_id) for ticket in tickets]
            outcomes = await _put(producer, metas, frames)
            if any(outcome != "accepted" for outcome in outcomes):
                raise DataError(f"every group is accepted; met {outcomes}")
            wanted -= len(tickets)
        print(num_bytes * config.algorithm.groups_per_step, flush=True)
    await producer.close()


async def _put(producer: Producer, metas: Sequence[GroupMeta], frames: Sequence[Any]) -> list[str]:
    """What :meth:`asyncrl.queue.client.Producer.put` does once its groups are encoded."""
    link, outcomes = producer._links[0], []
    for batch in producer._batches([producer._prepared(meta, frames, link) for meta in metas]):
        outcomes += await producer._put(link, batch)
    return outcomes


def consume(run_dir: RunDir) -> None:
    """Leases, fetches, sums up and commits one step for every line."""
    facts = run_dir.read_facts()
    with Consumer.connect(run_dir.read_config(), facts, "learner-0") as consumer:
        print("ready", flush=True)
        for step, _ in enumerate(sys.stdin):
            lease = consumer.lease(step, WAIT_S)
            if not lease.groups:
                raise DataError(f"a step has groups; met {lease.blocked}")
            print(sum(_fetch(consumer, meta.ticket) for meta in lease.groups), flush=True)
            consumer.commit(step)
            consumer.checkpointed(step + 1)


def _fetch(consumer: Consumer, ticket: int) -> int:
    """Bytes of a payload, whose checksum its reader compares with that of the producer."""
    payloads, frames = consumer._links[0].payloads([ticket], consumer._reader)
    return sum(len(piece) for piece in consumer._reader.pieces(payloads.groups[0], frames))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("producer", "consumer"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("trajectory_mb", type=float)
    options = parser.parse_args()
    keep_pages()
    if options.role == "producer":
        asyncio.run(produce(RunDir(options.run_dir), options.trajectory_mb))
    else:
        consume(RunDir(options.run_dir))


if __name__ == "__main__":
    main()
