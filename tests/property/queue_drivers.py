"""Binds the queue machine to the gate, alone and as shards that know nothing of each other. The machine is in ``queue_machine``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from queue_machine import BUDGET_GROUPS, DEAD_AFTER_S, DEADLINE_S, Driver, Shape

from asyncrl.config import Config
from asyncrl.queue.gate import Gate
from asyncrl.queue.messages import Frontier, QueueStatus
from asyncrl.queue.records import Blocked, Issue
from asyncrl.queue.settings import GateSettings
from asyncrl.trajectory import GroupMeta

__all__ = ["GateDriver", "ShardedDriver", "gate_settings"]


def gate_settings(shape: Shape, groups: int) -> GateSettings:
    """Settings of a gate that owes ``groups`` slots a step."""
    config = Config.model_validate(
        {
            "algorithm": {"groups_per_step": groups, "no_signal_budget_groups": BUDGET_GROUPS},
            "queue": {
                "max_staleness": shape.staleness,
                "window": shape.window,
                "ticket_deadline_s": DEADLINE_S,
                "dead_after_s": DEAD_AFTER_S,
                "max_queued_groups": shape.max_queued_groups,
            },
            "sync": {"every": shape.every},
        }
    )
    return GateSettings.from_config(config, shape.total)


class GateDriver:
    """One gate."""

    ordered: ClassVar[bool] = True

    def __init__(self, settings: GateSettings, frontier: Frontier | None = None) -> None:
        self.settings = settings
        self.gate = Gate(settings, frontier)

    def hello(self, producer: str, now_s: float) -> None:
        self.gate.hello(producer, now_s)

    def gone(self, producer: str, now_s: float) -> None:
        self.gate.producer_gone(producer, now_s)

    def heartbeat(self, producer: str, version: int, now_s: float) -> None:
        self.gate.heartbeat(producer, version, {}, 0, now_s)

    def issue(self, producer: str, version: int, now_s: float) -> Issue | Blocked:
        return self.gate.issue(producer, version, now_s)

    def finish(self, producer: str, meta: GroupMeta) -> str:
        return self.gate.finish(producer, meta)

    def fail(self, producer: str, ticket: int, attempt: int, final: bool) -> None:
        self.gate.fail(producer, ticket, attempt, "reward failed", final)

    def expire(self, now_s: float) -> None:
        self.gate.expire(now_s)

    def fence(self, incarnation: int) -> None:
        self.gate.fence(incarnation)

    def lease(self, step: int, incarnation: int, now_s: float) -> tuple[GroupMeta, ...] | Blocked:
        answer = self.gate.lease(step, incarnation, now_s)
        return answer if isinstance(answer, Blocked) else answer.groups_G

    def commit(self, step: int, incarnation: int) -> None:
        self.gate.commit(step, incarnation)

    def give_back(self, step: int, incarnation: int) -> None:
        self.gate.return_(step, incarnation)

    def frontiers(self) -> tuple[Frontier, ...]:
        return (self.gate.frontier(),)

    def statuses(self) -> tuple[QueueStatus, ...]:
        return (self.gate.status(),)

    def restored(self, frontiers: tuple[Frontier, ...]) -> GateDriver:
        return GateDriver(self.settings, frontiers[0])

    def recovered(self) -> GateDriver | None:
        """Nothing is written by this gate."""
        return None

    def picture(self) -> object:
        status = {name: value for name, value in _fields(self.gate.status()).items() if name != "blocked"}
        return status, self.gate.frontier()


class ShardedDriver:
    """A gate for each shard. Ticket ``t`` of the queue is ticket ``t // shards`` of shard ``t % shards``.

    The learner takes of each shard what that one owes; a lease is there when all are.
    """

    ordered: ClassVar[bool] = True

    def __init__(self, shape: Shape, shards: list[Driver]) -> None:
        self.shape = shape
        self.shards = shards
        self._next = 0

    def hello(self, producer: str, now_s: float) -> None:
        for shard in self.shards:
            shard.hello(producer, now_s)

    def gone(self, producer: str, now_s: float) -> None:
        for shard in self.shards:
            shard.gone(producer, now_s)

    def heartbeat(self, producer: str, version: int, now_s: float) -> None:
        for shard in self.shards:
            shard.heartbeat(producer, version, now_s)

    def issue(self, producer: str, version: int, now_s: float) -> Issue | Blocked:
        answer: Issue | Blocked = Blocked(reason="")
        for _ in self.shards:
            number, self._next = self._next, (self._next + 1) % len(self.shards)
            answer = self.shards[number].issue(producer, version, now_s)
            if isinstance(answer, Issue):
                return dataclasses.replace(answer, ticket=answer.ticket * len(self.shards) + number)
        return answer

    def finish(self, producer: str, meta: GroupMeta) -> str:
        local, shard = divmod(meta.ticket, len(self.shards))
        return self.shards[shard].finish(producer, dataclasses.replace(meta, ticket=local))

    def fail(self, producer: str, ticket: int, attempt: int, final: bool) -> None:
        local, shard = divmod(ticket, len(self.shards))
        self.shards[shard].fail(producer, local, attempt, final)

    def expire(self, now_s: float) -> None:
        for shard in self.shards:
            shard.expire(now_s)

    def fence(self, incarnation: int) -> None:
        for shard in self.shards:
            shard.fence(incarnation)

    def lease(self, step: int, incarnation: int, now_s: float) -> tuple[GroupMeta, ...] | Blocked:
        batch: list[GroupMeta] = []
        for number, shard in enumerate(self.shards):
            answer = shard.lease(step, incarnation, now_s)
            if isinstance(answer, Blocked):
                return answer
            batch += [dataclasses.replace(meta, ticket=meta.ticket * len(self.shards) + number) for meta in answer]
        return tuple(batch)

    def commit(self, step: int, incarnation: int) -> None:
        for shard in self.shards:
            shard.commit(step, incarnation)

    def give_back(self, step: int, incarnation: int) -> None:
        for shard in self.shards:
            shard.give_back(step, incarnation)

    def frontiers(self) -> tuple[Frontier, ...]:
        return tuple(frontier for shard in self.shards for frontier in shard.frontiers())

    def statuses(self) -> tuple[QueueStatus, ...]:
        return tuple(status for shard in self.shards for status in shard.statuses())

    def restored(self, frontiers: tuple[Frontier, ...]) -> ShardedDriver:
        return ShardedDriver(self.shape, [shard.restored((frontier,)) for shard, frontier in zip(self.shards, frontiers, strict=True)])

    def recovered(self) -> ShardedDriver | None:
        shards = [shard.recovered() for shard in self.shards]
        return None if None in shards else ShardedDriver(self.shape, [shard for shard in shards if shard is not None])

    def picture(self) -> object:
        return tuple(shard.picture() for shard in self.shards)


def _fields(status: QueueStatus) -> dict[str, object]:
    return {name: getattr(status, name) for name in status.__struct_fields__}
