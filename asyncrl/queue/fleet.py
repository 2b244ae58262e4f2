"""What the gate knows of its producers: version, life, tokens. Pure; the clock is passed in.

Versions said by one name never fall, over restarts too: a fall means that weights went backwards (fault B31). Names are
bounded: the dead of longest ago are forgotten when room is needed, and their tokens are counted on under one entry.

Source: design note, sections 2 and 4; faults B31, B51.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrl.bounds import MAX_TOTAL_TOKENS
from asyncrl.errors import QueueError, VersionError
from asyncrl.queue.records import ProducerMemory

__all__ = ["Fleet", "ProducerRecord"]

MAX_PRODUCERS = 4096
FORGOTTEN = "(forgotten)"  # no sender can have this name


@dataclass(slots=True, kw_only=True)
class ProducerRecord:
    """One name. ``version`` is -1 until said, ``has_said`` whether in this life; ``tokens_before`` counts those of former lives."""

    name: str
    seen_s: float
    alive: bool = True
    version: int = -1
    has_said: bool = False
    in_flight: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    tokens_before: int = 0
    trouble: str = ""


class Fleet:
    """The producers that said hello, at most ``limit`` at a time."""

    def __init__(self, limit: int = MAX_PRODUCERS) -> None:
        self._limit = limit
        self._records: dict[str, ProducerRecord] = {}
        self._left: ProducerRecord | None = None
        self.deaths = 0

    def hello(self, name: str, now_s: float) -> None:
        """A producer, or a new life of one, is there.

        Raises:
            QueueError: a new name, and as many producers as the queue can know are alive.
        """
        if name not in self._records and len(self._records) >= self._limit:
            self._make_room(name)
        record = self._records.setdefault(name, ProducerRecord(name=name, seen_s=now_s))
        record.alive, record.seen_s, record.in_flight, record.has_said = True, now_s, {}, False
        record.trouble = ""
        record.tokens_before, record.tokens = min(record.tokens_before + record.tokens, MAX_TOTAL_TOKENS), 0

    def _make_room(self, newcomer: str) -> None:
        """Forgets the one that died first; its tokens stay counted."""
        dead = [record for record in self._records.values() if not record.alive and record.name != FORGOTTEN]
        if not dead:
            raise QueueError(
                f"a queue knows up to {self._limit} living producers; {newcomer} would be one more: end some, or use more brokers",
                producer=newcomer,
            )
        gone = min(dead, key=lambda record: record.seen_s)
        del self._records[gone.name]
        total = self._records.setdefault(FORGOTTEN, ProducerRecord(name=FORGOTTEN, seen_s=gone.seen_s, alive=False))
        total.tokens_before = min(total.tokens_before + gone.tokens_before + gone.tokens, MAX_TOTAL_TOKENS)

    def remembered(self) -> dict[str, ProducerMemory]:
        """What the next process must know of every name."""
        return {
            r.name: ProducerMemory(version=r.version, tokens_before=r.tokens_before, tokens=r.tokens, alive=r.alive, has_said=r.has_said)
            for r in self._records.values()
        }

    def recall(self, memories: dict[str, ProducerMemory], now_s: float) -> None:
        """Producers of the process that went before; the living have until they are silent for too long."""
        for name, known in memories.items():
            self._records[name] = ProducerRecord(
                name=name,
                seen_s=now_s,
                alive=known.alive,
                version=known.version,
                has_said=known.has_said,
                tokens_before=known.tokens_before,
                tokens=known.tokens,
            )
            if not known.alive:
                self._records[name].trouble = "it was dead when the broker started"
                self._left = self._records[name]

    def forget_versions(self) -> None:
        """The weights went back to a checkpoint, and every producer will say which version it has then."""
        for record in self._records.values():
            record.version, record.has_said, record.in_flight = -1, False, {}

    def again(self, name: str, now_s: float) -> bool:
        """The same process says hello once more; False if it is not known as alive."""
        self.seen(name, now_s)
        return name in self._records

    def seen(self, name: str, now_s: float) -> None:
        """Any message is a sign of life, also from one that was taken for dead because it was slow."""
        record = self._records.get(name)
        if record is not None:
            record.alive, record.seen_s = True, now_s

    def says(self, name: str, version: int, learner_step: int | None) -> None:
        """The producer has committed ``version`` and asks for tickets by it; ``learner_step`` is None where that is not known.

        Raises:
            VersionError: lower than it said before, or above the learner's committed steps.
        """
        record = self._records[name]
        if version < max(record.version, 0):
            raise VersionError(
                f"a version is not negative and never falls; {name} said {record.version}, now {version}: load the current weights",
                producer=name,
                policy_version=version,
            )
        if learner_step is not None and version > learner_step:
            raise VersionError(
                f"a version counts training steps in the weights, of which {learner_step} are committed; {name} said {version}",
                producer=name,
                policy_version=version,
            )
        record.version, record.has_said = version, True

    def report_version(self, name: str, version: int, learner_step: int | None) -> None:
        """As :meth:`says`, but a new life that has not got its first weights yet may name those that it started with."""
        record = self._records[name]
        if record.has_said or version >= max(record.version, 0):
            self.says(name, version, learner_step)

    def report(self, name: str, in_flight: dict[int, int], sampled_tokens: int) -> None:
        """Tokens in flight by version, and tokens sampled in this life."""
        record = self._records[name]
        record.in_flight, record.tokens = dict(in_flight), max(record.tokens, sampled_tokens)

    def trouble(self, name: str, reason: str) -> None:
        """The last thing that went wrong there, for those who wait for it."""
        if name in self._records:
            self._records[name].trouble = reason

    def gone(self, name: str, reason: str) -> bool:
        """The producer is dead; False if it was not alive."""
        record = self._records.get(name)
        if record is None or not record.alive:
            return False
        record.alive, record.in_flight = False, {}
        record.trouble = f"{reason}; before that: {record.trouble}" if record.trouble else reason
        self._left = record
        self.deaths += 1
        return True

    def postpone(self, seconds: float) -> None:
        """So much time does not count for anybody's silence: nobody was listened to."""
        for record in self._records.values():
            record.seen_s += seconds
        if self._left is not None and self._records.get(self._left.name) is not self._left:
            self._left.seen_s += seconds

    def silent(self, now_s: float, dead_after_s: float) -> list[str]:
        """Names of the living that have said nothing for too long."""
        return [r.name for r in self._records.values() if r.alive and now_s - r.seen_s >= dead_after_s]

    def knows(self, name: str) -> bool:
        """Whether the producer said hello and is alive."""
        return name in self._records and self._records[name].alive

    def remembers(self, name: str) -> bool:
        """Whether the producer said hello and was not forgotten since, alive or dead."""
        return name in self._records

    def version(self, name: str) -> int:
        """The version that it committed last, -1 before it said one."""
        return self._records[name].version

    def versions(self) -> dict[str, int]:
        """Committed version of each living producer."""
        return {r.name: r.version for r in self._records.values() if r.alive}

    def obituary(self) -> str:
        """Who was the last to die and of what, when nobody is alive; empty otherwise."""
        if self._left is None or any(r.alive for r in self._records.values()):
            return ""
        return f"no producer is alive; {self._left.name}: {self._left.trouble}"

    def empty_for_s(self, now_s: float) -> float:
        """Seconds since the last producer was heard of, when all are dead; 0.0 otherwise."""
        return now_s - self._left.seen_s if self._left is not None and self.obituary() else 0.0

    def total_tokens(self) -> int:
        """Tokens sampled by all producers over all their lives."""
        return sum(r.tokens_before + r.tokens for r in self._records.values())

    def in_flight(self) -> dict[int, int]:
        """Tokens in flight by version, all living producers together."""
        total: Counter[int] = Counter()
        for record in self._records.values():
            total.update(record.in_flight)
        return dict(total)
