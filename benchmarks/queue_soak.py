"""A queue alone for a long time: resident memory, open files, threads and disk stay flat while groups go through.

``python -m benchmarks.queue_soak --minutes 60 --json FILE``. A real broker with its log on disk, two producers and a consumer, each a
process. The queue is filled to ``--queued`` groups; from then on the consumer trains a step every ``--step-s`` seconds, producers fill up
what it took, and each process is looked at every ``--look-s`` seconds. Exit code 1 if anything grew, or if the counts do not add up.

Flat: the largest value in the last quarter is at most 2 % and a small constant over the largest value in the second quarter. The first
quarter, from the moment the queue is full, is the warm-up: buffers and free pages find their size in it.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from asyncrl.config.run_dir import RunDir, write_atomic
from asyncrl.errors import DataError
from asyncrl.queue.client import Observer, Producer
from asyncrl.queue.consumer import Consumer
from asyncrl.queue.heap import keep_pages
from asyncrl.queue.messages import QueueStatus, Ticket
from asyncrl.trajectory import TrajectoryGroup
from benchmarks.figures import Figure, table, write_json
from benchmarks.groups import make_group
from benchmarks.queue_carrier import broker, new_run

GROUPS_PER_STEP = 64
SIBLINGS = 8
TRAJECTORY_MB = 0.002
PRODUCERS = 2
CHECKPOINT_EVERY = 20
MAX_STALENESS = 256
WAIT_S = 2.0
ALLOWANCE = {"resident memory": 4.0, "open files": 2.0, "threads": 0.0, "disk": 8.0, "shared memory": 8.0}
"""What any of these may grow by beyond 2 %, in its unit."""

UNITS = {"resident memory": "MiB", "open files": "files", "threads": "threads", "disk": "MiB", "shared memory": "MiB"}


@dataclass(frozen=True, slots=True)
class Look:
    """All figures at one moment, by (process, figure)."""

    at_s: float
    values: dict[tuple[str, str], float]


def produce(run_dir: RunDir, name: str) -> None:
    """Samples nothing: puts a group under every ticket that it gets, until the queue stops."""

    async def loop() -> None:
        producer = await Producer.connect(run_dir.read_config(), run_dir.read_facts(), name)
        model = make_group(SIBLINGS, TRAJECTORY_MB)
        sampled = 0
        while True:
            version = _version(run_dir)
            answer = await producer.tickets(version, 16, WAIT_S)
            if answer.stopping:
                break
            groups = [_under(model, ticket, version, name) for ticket in answer.tickets]
            if groups:
                outcomes = await producer.put(groups)
                if set(outcomes) != {"accepted"}:
                    raise DataError(f"every group is accepted; met {outcomes}")
                sampled += sum(group.meta(payload_bytes=0).num_sampled_tokens for group in groups)
            await producer.heartbeat(version, {}, sampled)
        await producer.close()

    asyncio.run(loop())


def _version(run_dir: RunDir) -> int:
    """Steps that the consumer has committed; 0 before the first."""
    try:
        return int(run_dir.path.joinpath("version").read_text())
    except FileNotFoundError:
        return 0


def _under(model: TrajectoryGroup, ticket: Ticket, version: int, name: str) -> TrajectoryGroup:
    changes = {"ticket": ticket.ticket, "attempt": ticket.attempt, "group_id": ticket.group_id, "generator": name}
    spans = tuple(replace(span, version=version) for span in model.trajectories[0].version_spans)
    return TrajectoryGroup(trajectories=tuple(replace(row, version_spans=spans, **changes) for row in model.trajectories))


def consume(run_dir: RunDir, queued: int, step_s: float) -> None:
    """Waits until the queue is full, then reads, checks and commits a step at a time, with a checkpoint now and then."""
    facts = run_dir.read_facts()
    with Consumer.connect(run_dir.read_config(), facts, "learner-0") as consumer:
        with Observer.connect(run_dir.read_config(), facts, "full") as observer:
            while observer.status().queued_groups < queued:
                time.sleep(0.5)
        print("full", flush=True)
        step, began_s = 0, time.monotonic()
        while True:
            lease = consumer.lease(step, WAIT_S)
            if lease.ended:
                return
            if not lease.groups:
                continue
            groups, damaged = consumer.fetch(lease.groups)
            if damaged or len(groups) != GROUPS_PER_STEP:
                raise DataError(f"every leased group can be read; met {len(groups)} of {GROUPS_PER_STEP}, {damaged}")
            consumer.commit(step)
            step += 1
            write_atomic(run_dir.path / "version", str(step))
            if step % CHECKPOINT_EVERY == 0:
                consumer.checkpointed(step - CHECKPOINT_EVERY)
            time.sleep(max(0.0, began_s + step * step_s - time.monotonic()))


@contextmanager
def _end(role: str, run_dir: RunDir, name: str, queued: int, step_s: float) -> Iterator[subprocess.Popen[str]]:
    arguments = [role, str(run_dir.path), name, str(queued), str(step_s)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.queue_soak", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)


def soak(minutes: float, queued: int, step_s: float, look_s: float) -> list[Figure]:
    """Runs it; one figure for each process and quantity, and the counts.

    Raises:
        DataError: a process of it ended.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-soak-") as folder, ExitStack() as stack:
        options = {"durability": "written", "max_queued_groups": queued, "max_staleness": MAX_STALENESS}
        run_dir = new_run(Path(folder), GROUPS_PER_STEP, options)
        processes = {"broker": stack.enter_context(broker(run_dir)).pid}
        consumer = stack.enter_context(_end("consume", run_dir, "learner-0", queued, step_s))
        processes["consumer"] = consumer.pid
        for number in range(PRODUCERS):
            name = f"generator-{number}"
            processes[name] = stack.enter_context(_end("produce", run_dir, name, queued, step_s)).pid
        assert consumer.stdout is not None
        if consumer.stdout.readline().strip() != "full":
            raise DataError("the queue was never full: a process of the soak ended")
        looks, began_s = [], time.monotonic()
        while time.monotonic() - began_s < minutes * 60:
            looks.append(Look(time.monotonic() - began_s, _look(processes, run_dir)))
            time.sleep(look_s)
        with Observer.connect(run_dir.read_config(), run_dir.read_facts(), "end") as observer:
            status = observer.status()
    return [*_figures(looks), *_counts(status, queued)]


def _look(processes: dict[str, int], run_dir: RunDir) -> dict[tuple[str, str], float]:
    values: dict[tuple[str, str], float] = {}
    for name, pid in processes.items():
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            raise DataError(f"{name} ended in the middle of the soak")
        memory = process.memory_info()
        values[name, "resident memory"] = (memory.rss - memory.shared) / (1 << 20)
        values[name, "open files"] = process.num_fds()
        values[name, "threads"] = process.num_threads()
    values["queue", "disk"] = _mib(run_dir.path.joinpath("queue").rglob("*"))
    values["queue", "shared memory"] = _mib(Path("/dev/shm").glob(f"asyncrl-{run_dir.read_facts().run_id}*"))
    return values


def _mib(files: Iterator[Path]) -> float:
    total = 0
    for file in files:
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # removed while the folder was read
    return total / (1 << 20)


def _figures(looks: Sequence[Look]) -> list[Figure]:
    end_s = looks[-1].at_s
    figures = []
    for key in looks[0].values:
        early = max(look.values[key] for look in looks if 0.25 * end_s <= look.at_s < 0.5 * end_s)
        late = max(look.values[key] for look in looks if look.at_s >= 0.75 * end_s)
        goal = early * 1.02 + ALLOWANCE[key[1]]
        floor = max(early, 1e-9)
        name = f"{key[1]} of the {key[0]}"
        figures.append(
            Figure(name=name, value=late, unit=UNITS[key[1]], floor=early, ratio=late / floor, goal=goal / floor, holds=late <= goal)
        )
    return figures


def _counts(status: QueueStatus, queued: int) -> list[Figure]:
    dropped = sum(status.dropped.values())
    missing = status.admitted - status.trained - dropped - status.in_flight
    least = queued * 0.9
    return [
        Figure(name="groups trained", value=float(status.trained), unit="groups"),
        Figure(name="groups queued", value=float(status.queued_groups), unit="groups", goal=least, holds=status.queued_groups >= least),
        Figure(name="groups unaccounted for", value=float(missing), unit="groups", goal=0.0, holds=missing == 0),
        Figure(name="groups dropped", value=float(dropped), unit="groups", goal=0.0, holds=dropped == 0),
    ]  # fmt: skip


def main() -> int:
    """Runs the soak, or a process of it."""
    if sys.argv[1:2] and sys.argv[1] in ("produce", "consume"):
        keep_pages()
        role, folder, name, queued, step_s = sys.argv[1:]
        if role == "produce":
            produce(RunDir(folder), name)
        else:
            consume(RunDir(folder), int(queued), float(step_s))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--queued", type=int, default=10_000, help="groups in the queue")
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds between two steps")
    parser.add_argument("--look-s", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = soak(options.minutes, options.queued, options.step_s, options.look_s)
    print(table(figures), end="")
    if options.json:
        write_json(options.json, figures)
    return int(any(figure.holds is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
