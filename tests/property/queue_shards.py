"""Binds the queue machine to several brokers behind the learner's own client, over links that can die before or after a request is done."""

from __future__ import annotations

from collections.abc import Sequence

from queue_drivers import GateDriver, config_of
from queue_model import Shape

from asyncrl.errors import PeerTimeout
from asyncrl.queue.consumer import Consumer
from asyncrl.queue.ledger import merge_frontiers, split_frontier
from asyncrl.queue.messages import Committed, Frontier, Lease
from asyncrl.queue.payload_reader import PayloadReader
from asyncrl.queue.records import Blocked, GroupRecord, Issue
from asyncrl.queue.settings import GateSettings, share_of
from asyncrl.trajectory import GroupMeta

__all__ = ["ShardedDriver"]


class Link:
    """Stands for :class:`asyncrl.queue.consumer.ConsumerLink`."""

    max_message_bytes = 1 << 20

    def __init__(self, driver: ShardedDriver, shard: int, incarnation: int) -> None:
        self._driver, self._shard, self._incarnation = driver, shard, incarnation
        self.hello(0.0)

    def _broker(self) -> GateDriver:
        broker = self._driver.shards[self._shard]
        if not broker.alive:
            raise PeerTimeout(f"shard {self._shard} is dead")
        return broker

    def hello(self, timeout_s: float, again: bool = False) -> None:
        broker = self._broker()
        broker.fence(self._incarnation)
        self.frontier = broker.gate.frontier()

    def lease(self, step: int, wait_s: float, extra: int = 0) -> Lease:
        answer = self._broker().lease(step, self._incarnation, self._driver.now_s, extra)
        if not isinstance(answer, Blocked):
            self._driver.may_die(self._shard, "lease")
        if isinstance(answer, Blocked):
            return Lease(step=step, groups=(), blocked=answer.reason, ended=answer.ended)
        return Lease(step=step, groups=answer)

    def commit(self, step: int, priorities: dict[int, float]) -> Committed:
        self._driver.may_die(self._shard, "before commit")
        frontier = self._broker().commit(step, self._incarnation, priorities)
        self._driver.may_die(self._shard, "after commit")
        return Committed(frontier=frontier, status=self._broker().status())

    def return_(self, step: int, damaged: Sequence[tuple[int, int, str]] = ()) -> None:
        self._driver.may_die(self._shard, "return")
        self._broker().give_back(step, self._incarnation, list(damaged))

    def checkpointed(self, steps: int) -> None:
        self._broker().checkpointed(steps)

    def close(self) -> None:
        pass


class ShardedDriver:
    """A broker for each shard.

    Attributes:
        dying: the shard that dies next, and when.
    """

    def __init__(self, shape: Shape, shards: list[GateDriver], incarnation: int) -> None:
        self.shape, self.shards = shape, shards
        self.now_s, self._next = 0.0, 0
        self.dying: tuple[int, str] = (-1, "")
        self._missed: dict[int, set[str]] = {}
        self._connect(incarnation)

    @classmethod
    def of(cls, shape: Shape) -> ShardedDriver:
        config = config_of(shape)
        shards = [GateDriver(GateSettings.from_config(config, shape.total, shard), None, 0) for shard in range(shape.shards)]
        return cls(shape, shards, 0)

    def _connect(self, incarnation: int) -> None:
        links = [Link(self, shard, incarnation) for shard in range(self.shape.shards)]
        shares = [share_of(self.shape.groups, shard, self.shape.shards) for shard in range(self.shape.shards)]
        self.consumer = Consumer(links, shares, PayloadReader("property"), self.shape.max_uses)

    # death and return of a shard

    @property
    def whole(self) -> bool:
        """Whether every shard lives and the learner knows it."""
        return all(shard.alive for shard in self.shards) and not self.consumer._dead

    def may_die(self, shard: int, moment: str) -> None:
        if self.dying == (shard, moment):
            self.die(shard)
            raise PeerTimeout(f"shard {shard} died at {moment}")

    def die(self, shard: int) -> None:
        self.shards[shard].alive = False
        self.dying = (-1, "")
        self._missed[shard] = set()

    def revive(self, shard: int, now_s: float) -> None:
        """It recovers; producers that were started again meanwhile say hello, the others go on."""
        if not self.shards[shard].alive:
            self.shards[shard] = self.shards[shard].recovered(now_s)
            for producer in sorted(self._missed.pop(shard)):
                self.shards[shard].hello(producer, now_s)

    # producers

    def hello(self, producer: str, now_s: float) -> None:
        for shard in self.brokers():
            shard.hello(producer, now_s)
        for missed in self._missed.values():
            missed.add(producer)

    def gone(self, producer: str, now_s: float) -> None:
        for shard in self.brokers():
            shard.gone(producer, now_s)

    def heartbeat(self, producer: str, version: int, now_s: float) -> None:
        for shard in self.brokers():
            shard.heartbeat(producer, version, now_s)

    def issue(self, producer: str, version: int, now_s: float) -> Issue | Blocked:
        answer: Issue | Blocked = Blocked(reason="")
        for _ in self.shards:
            shard, self._next = self.shards[self._next], (self._next + 1) % len(self.shards)
            if shard.alive:
                answer = shard.issue(producer, version, now_s)
            if isinstance(answer, Issue):
                break
        return answer

    def finish(self, producer: str, meta: GroupMeta, now_s: float) -> str:
        return self.shards[meta.ticket % len(self.shards)].finish(producer, meta, now_s)

    def fail(self, producer: str, ticket: int, attempt: int, final: bool) -> None:
        self.shards[ticket % len(self.shards)].fail(producer, ticket, attempt, final)

    def serves(self, ticket: int) -> bool:
        return self.shards[ticket % len(self.shards)].alive

    # time, supervision, learner

    def expire(self, now_s: float) -> None:
        for shard in self.brokers():
            shard.expire(now_s)

    def stop(self) -> None:
        for shard in self.shards:
            shard.stop()

    def fence(self, incarnation: int) -> None:
        self._connect(incarnation)

    def lease(self, step: int, incarnation: int, now_s: float) -> tuple[GroupMeta, ...] | Blocked:
        self.now_s = now_s
        answer = self.consumer.lease(step, 0.0)
        return answer.groups or Blocked(reason=answer.blocked or "the prompts are used up", ended=answer.ended)

    def commit(self, step: int, incarnation: int, priorities: dict[int, float]) -> Frontier:
        return self.consumer.commit(step, priorities).frontier

    def give_back(self, step: int, incarnation: int, damaged: list[tuple[int, int, str]]) -> None:
        self.consumer.return_(step, damaged)

    def checkpointed(self, steps: int) -> None:
        self.consumer.checkpointed(steps)

    def restored(self, frontier: Frontier, incarnation: int, now_s: float, keep: bool) -> ShardedDriver:
        number = len(self.shards)
        shards = [
            shard.restored(split_frontier(frontier, position, number), incarnation, now_s, keep)
            for position, shard in enumerate(self.shards)
        ]
        return ShardedDriver(self.shape, shards, incarnation)

    # what the machine looks at

    def brokers(self) -> list[GateDriver]:
        return [shard for shard in self.shards if shard.alive]

    def live(self) -> list[GroupRecord]:
        return [record for shard in self.shards for record in shard.live()]

    def frontier(self) -> Frontier:
        return merge_frontiers([shard.gate.frontier() for shard in self.shards])
