"""kill -9 of brokers, producers and consumers over and over: ``python -m benchmarks.queue_kills --points 200 --seed 0``.

Consumes a seed; produces a :class:`Tally` of one run directory that lived through all of it. It waits for deaths, and for the queue to
run dry at the end; every wait has a deadline. What must hold at the end stands in :mod:`benchmarks.queue_kill_checks`.

Source: design note, section 4, "Exactly once"; fault B58.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import AsyncRLError
from asyncrl.queue.client import Observer
from asyncrl.queue.messages import QueueStatus
from asyncrl.queue.shm import SegmentKeeper
from benchmarks.children import child_environment
from benchmarks.queue_kill_checks import Tally, check

__all__ = ["MODES", "KillRun", "main", "new_kill_run"]

ROOT = Path(__file__).parents[1]
PRODUCERS = ("generator-0", "generator-1")
BROKER_KINDS = {"write": 12, "torn": 12, "statement": 150, "send": 40, "sent": 40}  # calls, of which one is the last
CONSUMER_POINTS = 24
PRODUCER_LIFE_S = 1.0
BROKER_LIFE_S = 1.5
READY_S, DRY_S = 120.0, 60.0
STEPS_AFTER = 3
POLL_S = 0.05
MODES = {"broker": ("broker",), "clients": ("producer", "consumer"), "all": ("broker", "producer", "consumer")}


def new_kill_run(folder: Path, payload: str) -> RunDir:
    """A run directory whose queue is written to disk and given up for dead quickly."""
    run_dir = RunDir(folder)
    queue = {
        "max_staleness": 3, "window": 4, "dead_after_s": 1.2, "heartbeat_s": 0.2, "max_attempts": 1000,
        "durability": "written", "payload": payload, "max_queued_mib": 64,
    }  # fmt: skip
    algorithm = {"groups_per_step": 4, "group_size": 2}
    run_dir.write_config(Config.model_validate({"queue": queue, "algorithm": algorithm}))
    run_dir.write_facts(
        RunFacts(
            run_id=f"k{zlib.crc32(str(run_dir.path).encode()):08x}", incarnation=0, queue_endpoints=(f"ipc://{run_dir.path}/q",),
            sync_endpoint=f"ipc://{run_dir.path}/s", rendezvous="tcp://127.0.0.1:1", model_dir="", generator_device="cpu",
            learner_device="cpu",
        )
    )  # fmt: skip
    return run_dir


class Nursery:
    """The process that forks the others; see :mod:`benchmarks.queue_kill_nursery`."""

    def __init__(self, logs: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.queue_kill_nursery"]
        self._process = subprocess.Popen(command, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._logs = logs
        self._buffer = b""
        self._dead: dict[int, int] = {}
        self._born: list[int] = []

    def bear(self, name: str, role: str, arguments: Sequence[Any], kill_at: str = "") -> int:
        """Starts a process; returns its id."""
        order = {"role": role, "arguments": arguments, "log": str(self._logs / f"{name}.log"), "kill_at": kill_at}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        deadline_s = time.monotonic() + READY_S  # the first one waits for the imports
        while not self._born:
            assert time.monotonic() < deadline_s, "the nursery bears nobody"
            self._listen(0.1)
        return self._born.pop()

    def deaths(self, timeout_s: float) -> dict[int, int]:
        """Exit codes of those that died since the last call, waited for up to ``timeout_s``."""
        if not self._dead:
            self._listen(timeout_s)
        dead, self._dead = self._dead, {}
        return dead

    def close(self) -> None:
        """Ends it and whoever still lives."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _listen(self, timeout_s: float) -> None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return
        read = os.read(self._process.stdout.fileno(), 1 << 16)
        assert read, "the nursery is dead"
        *lines, self._buffer = (self._buffer + read).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "born" in said:
                self._born.append(said["born"])
            else:
                self._dead[said["died"]] = said["status"]


class KillRun:
    """One run directory through ``points`` deaths.

    Args:
        victims: roles that are killed; the others live through it.
    """

    def __init__(self, folder: Path, victims: Sequence[str], payload: str, seed: int) -> None:
        self.run_dir = new_kill_run(folder, payload)
        self.run_dir.logs.mkdir()
        self.tally = Tally(seed=seed)
        self._random = random.Random(seed)
        self._victims, self._seed, self._payload = victims, seed, payload
        self._incarnation = 0
        self._roles: dict[int, tuple[str, str]] = {}
        self._due_s: dict[int, float] = {}
        self._nursery = Nursery(self.run_dir.logs)

    def run(self, points: int) -> Tally:
        """Kills so often, lets the queue run dry, and checks."""
        self._start("broker")
        started_s = time.monotonic()
        for role in ("consumer", *PRODUCERS):
            self._start(role)
        while self.tally.killed.total() < points and not self.tally.problems:
            self._turn()
        self.tally.points_s = time.monotonic() - started_s
        if not self.tally.problems:
            self._finish()
        self.tally.seconds = time.monotonic() - started_s
        return self.tally

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._nursery.close()
        SegmentKeeper(self.run_dir.read_facts().run_id).sweep(())

    def _start(self, name: str, mortal: bool = True) -> None:
        role = "producer" if name in PRODUCERS else name
        folder, kill_at, life_s = str(self.run_dir.path), "", 0.0
        mortal = mortal and role in self._victims
        arguments: list[Any] = [folder]
        if role == "broker" and mortal:
            life_s = BROKER_LIFE_S
            kind = self._random.choice([*BROKER_KINDS, "time"])
            if kind == "time":
                life_s = self._random.uniform(0.05, BROKER_LIFE_S / 2)
            else:
                kill_at = f"{kind}:{self._random.randrange(BROKER_KINDS[kind])}"
        elif role == "producer":
            arguments += [name, self._seed]
            longest_s = PRODUCER_LIFE_S * (4 if "broker" in self._victims else 1)
            life_s = self._random.uniform(0.02, longest_s) if mortal else 0.0
        elif role == "consumer":
            arguments += [self._incarnation]
            kill_at = f"point:{self._random.randrange(CONSUMER_POINTS)}" if mortal else ""
        pid = self._nursery.bear(name, role, arguments, kill_at)
        self._roles[pid] = (name, kill_at.partition(":")[0] or "time")
        if life_s:
            self._due_s[pid] = time.monotonic() + life_s

    def _turn(self) -> None:
        """Deaths that are due; the dead start again."""
        now_s = time.monotonic()
        for pid in [pid for pid, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[pid]
            _kill(pid)
        next_s = min(self._due_s.values(), default=now_s + 1.0)
        for name in self._deaths(max(0.0, min(1.0, next_s - time.monotonic()))):
            self._start(name)

    def _deaths(self, timeout_s: float) -> list[str]:
        names = []
        for pid, status in self._nursery.deaths(timeout_s).items():
            name, kind = self._roles.pop(pid)
            self._due_s.pop(pid, None)
            names.append(name)
            if status != -signal.SIGKILL:
                log = (self.run_dir.logs / f"{name}.log").read_text()[-3000:]
                self.tally.problems.append(f"{name} ended with {status} by itself: {log}")
                continue
            role = "producer" if name in PRODUCERS else name
            self.tally.killed[f"{role} {kind}"] += 1
            self._incarnation += role == "consumer"
        return names

    def _finish(self) -> None:
        """Everyone lives for good, no ticket is given any more, and what waits is trained."""
        alive = {name for name, _ in self._roles.values()}
        for name in {"broker", "consumer", *PRODUCERS} - alive:
            self._start(name, mortal=False)
        self._due_s = {}
        self._replace_mortals()
        config, facts = self.run_dir.read_config(), self.run_dir.read_facts()
        with Observer.connect(config, facts, "driver", DRY_S) as observer:
            deadline_s = time.monotonic() + DRY_S
            goal = observer.status().step + STEPS_AFTER
            while observer.status().step < goal and not self.tally.problems:
                self._expect(time.monotonic() < deadline_s, f"the queue goes on after the last kill; it stands: {observer.status()}")
                time.sleep(POLL_S)
            observer.stop()
            self._until(lambda: not {"consumer", *PRODUCERS} & {name for name, _ in self._roles.values()}, deadline_s, observer)
            status: QueueStatus = observer.status()
            observer.stop(exit=True)
        self._until(lambda: not self._roles, time.monotonic() + DRY_S, None)
        if not self.tally.problems:
            check(self.run_dir, status, self.tally)

    def _expect(self, holds: bool, rule: str) -> None:
        if not holds:
            self.tally.problems.append(rule)

    def _replace_mortals(self) -> None:
        """Those with a fuse are killed, and come back without one."""
        mortal = [pid for pid, (name, kind) in self._roles.items() if kind != "time"]
        for pid in mortal:
            _kill(pid)
        deadline_s = time.monotonic() + DRY_S
        while any(pid in self._roles for pid in mortal) and time.monotonic() < deadline_s:
            for name in self._deaths(0.1):
                self._start(name, mortal=False)

    def _until(self, reached: Callable[[], bool], deadline_s: float, observer: Observer | None) -> None:
        while not reached():
            for pid, status in self._nursery.deaths(0.1).items():
                name, _ = self._roles.pop(pid)
                if status != 0:
                    log = (self.run_dir.logs / f"{name}.log").read_text()[-3000:]
                    self.tally.problems.append(f"{name} ended with {status} after the last kill: {log}")
                    return
            if time.monotonic() > deadline_s:
                said = observer.status() if observer is not None else "nobody is asked"
                self.tally.problems.append(f"after the last kill {self._roles.values()} did not come to an end within {DRY_S} s; {said}")
                return


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # its fuse was quicker
        os.kill(pid, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kills ``points`` times in each mode and prints a line of figures; exit code 1 if something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue_kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=int, default=200, help="deaths in each mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=[*MODES, "each"], default="each", help="who is killed; each: broker, then clients, then all")
    parser.add_argument("--payload", choices=["shm", "inline", "both"], default="both", help="both: half of the points with each")
    parser.add_argument("--keep", action="store_true", help="keep the run directories")
    options = parser.parse_args(arguments)
    failed = 0
    for mode in MODES if options.mode == "each" else [options.mode]:
        payloads = ["shm", "inline"] if options.payload == "both" else [options.payload]
        for number, payload in enumerate(payloads):
            folder = Path(tempfile.mkdtemp(prefix=f"asyncrl-kills-{mode}-"))
            with KillRun(folder, MODES[mode], payload, options.seed + number) as run:
                tally = run.run(options.points // len(payloads))
            print(f"{mode} {payload}: {tally.line()}", flush=True)
            failed += bool(tally.problems)
            for problem in tally.problems:
                print(f"  {problem}", file=sys.stderr)
            if options.keep:
                print(f"  kept: {folder}", file=sys.stderr)
            else:
                subprocess.run(["rm", "-rf", str(folder)], check=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AsyncRLError as error:
        sys.exit(str(error))
