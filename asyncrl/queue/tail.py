"""What happens in a queue, as it happens: commits from the ledgers, refusals from the brokers that answer.

Consumes the ledgers of a run directory, read-only, and the status of live brokers; produces :class:`Happening`. It waits for
``interval_s`` between two looks, and for a broker no longer than ANSWER_S; one that does not answer is asked again later.

Source: design note, section 4, "Inspection".
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import AsyncRLError
from asyncrl.queue.client import Observer
from asyncrl.queue.durable.rows import StepRow
from asyncrl.queue.inspect import open_shards
from asyncrl.queue.messages import QueueStatus

__all__ = ["Brokers", "Happening", "follow"]

ANSWER_S = 2.0
ASK_AGAIN_S = 10.0


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One line: ``kind`` is commit, restore, refused or broker; ``time_s`` in unix seconds."""

    time_s: float
    kind: str
    text: str
    shard: int = 0
    step: int = -1


class Brokers:
    """An observer's connection to the brokers of a run, made anew when it broke."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._observer: Observer | None = None

    def status(self) -> QueueStatus | None:
        """What they say; None if one of them does not answer."""
        run_dir = RunDir(self._run)
        try:
            if self._observer is None:
                config, facts = run_dir.read_config(), run_dir.read_facts()
                name = "inspect" if config.queue.keys else f"inspect-{os.getpid()}"
                self._observer = Observer.connect(config, facts, name, timeout_s=ANSWER_S, answer_s=ANSWER_S)
            return self._observer.status()
        except AsyncRLError:  # dead, or not to be reached from here: the files are all there is
            self.close()
            return None

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._observer is not None:
            self._observer.close()
            self._observer = None


def follow(run: Path, interval_s: float, last: int = 10, ended: Callable[[], bool] = lambda: False) -> Iterator[Happening]:
    """The ``last`` commits, then all that comes, until ``ended``.

    Raises:
        DataError: no ledger is there.
    """
    with open_shards(run) as shards:
        seen = {files.shard: max([0, *(row.step - last + 1 for row in files.view.steps()[-1:])]) for files in shards}
    brokers, refused, answers, ask_s = Brokers(run), Counter[str](), True, 0.0
    try:
        while True:
            yield from _commits(run, seen)
            if time.monotonic() >= ask_s:
                status = brokers.status()
                if (status is not None) is not answers:
                    answers = status is not None
                    text = "the queue answers" if answers else "no broker answers: only what was written can be seen"
                    yield Happening(time_s=time.time(), kind="broker", text=text)
                yield from _refusals(status, refused)
                ask_s = time.monotonic() + (0.0 if answers else ASK_AGAIN_S)
            if ended():
                return
            time.sleep(interval_s)
    finally:
        brokers.close()


def _commits(run: Path, seen: dict[int, int]) -> Iterator[Happening]:
    """Steps from ``seen`` on, by shard; a restore takes it back."""
    found: list[tuple[StepRow, int]] = []
    with open_shards(run) as shards:
        for files in shards:
            steps = files.view.steps()
            newest = steps[-1].step if steps else -1
            if newest + 1 < seen[files.shard]:
                yield Happening(time_s=time.time(), kind="restore", text=f"back to {newest + 1} steps", shard=files.shard, step=newest)
                seen[files.shard] = newest + 1
            found.extend((row, files.shard) for row in steps if row.step >= seen[files.shard])
    for row, shard in sorted(found, key=lambda each: (each[0].committed_s, each[1])):
        seen[shard] = row.step + 1
        yield _commit(row, shard)


def _refusals(status: QueueStatus | None, known: Counter[str]) -> Iterator[Happening]:
    if status is None:
        return
    for kind, number in sorted(status.refused.items()):
        if number != known[kind]:
            yield Happening(time_s=time.time(), kind="refused", text=f"{kind}: {number - known[kind]} more, {number} in all")
            known[kind] = number


def _commit(row: StepRow, shard: int) -> Happening:
    frontier = row.frontier
    dropped = ", ".join(f"{count} {reason}" for reason, count in frontier.dropped.items()) or "none"
    text = f"step {row.step}: {frontier.trained} trained, dropped: {dropped}; settled below {frontier.low}, incarnation {row.incarnation}"
    return Happening(time_s=row.committed_s, kind="commit", text=text, shard=shard, step=row.step)
