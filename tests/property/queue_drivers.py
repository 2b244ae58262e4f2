"""Binds the queue machine to one broker without its socket: gate, journal, payload store, and a ledger in memory.

After every request the journal commits, as the broker does before it replies, so that what is recovered is what was acknowledged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from queue_memory import MemoryLedger, MemoryLog
from queue_model import Shape

from asyncrl.config import Config
from asyncrl.queue.gate import Gate
from asyncrl.queue.journal import Journal
from asyncrl.queue.messages import Frontier, Put, PutItem, QueueStatus
from asyncrl.queue.opening import reopened
from asyncrl.queue.puts import Puts
from asyncrl.queue.records import Blocked, GroupRecord, Issue, LeaseGranted, Settled
from asyncrl.queue.settings import GateSettings
from asyncrl.queue.store import PayloadStore
from asyncrl.trajectory import GroupMeta

__all__ = ["BUDGET_GROUPS", "DEADLINE_S", "DEAD_AFTER_S", "GateDriver", "config_of"]

DEADLINE_S = 50.0
DEAD_AFTER_S = 20.0
BUDGET_GROUPS = 2
MAX_LOG = 40


def config_of(shape: Shape) -> Config:
    """Options of a run of that shape."""
    return Config.model_validate(
        {
            "algorithm": {"groups_per_step": shape.groups, "no_signal_budget_groups": BUDGET_GROUPS},
            "queue": {
                "max_staleness": shape.staleness,
                "window": shape.window,
                "ticket_deadline_s": DEADLINE_S,
                "dead_after_s": DEAD_AFTER_S,
                "max_queued_groups": shape.max_queued_groups,
                "shards": shape.shards,
                "order": shape.order,
                "max_uses": shape.max_uses,
                "samples_per_insert": shape.rate,
            },
            "sync": {"every": shape.every},
        }
    )


class GateDriver:
    """One shard of a queue; the only one, unless ``settings`` say otherwise.

    Attributes:
        settled: groups settled since they were last taken by the machine.
    """

    def __init__(self, settings: GateSettings, frontier: Frontier | None, incarnation: int) -> None:
        self.settings = settings
        self.settled: list[Settled] = []
        self.alive = True
        self._open(MemoryLedger(), MemoryLog(), incarnation)
        self.gate = Gate(settings, frontier, incarnation)
        self.write()

    def _open(self, ledger: MemoryLedger, log: MemoryLog, incarnation: int) -> None:
        self.ledger, self.log, self.incarnation = ledger, log, incarnation
        self.store = PayloadStore("property", log)
        self.journal = Journal(self.store, ledger, synced=False, max_log_bytes=MAX_LOG)
        self._puts = Puts(self.store, Counter())

    def reopened(self, frontier: Frontier, incarnation: int, now_s: float) -> GateDriver:
        """A broker that starts over the same ledger: recovered, or restored to ``frontier`` if ``incarnation`` is a later one."""
        other = object.__new__(GateDriver)
        other.settings, other.settled, other.alive = self.settings, list(self.settled), True
        ledger = MemoryLedger(self.ledger)
        other._open(ledger, MemoryLog([row.place for row in ledger.rows() if row.place is not None]), incarnation)
        other.gate = reopened(ledger.load(), other.store, other.journal, self.settings, frontier, incarnation, now_s)
        other.write()
        return other

    def recovered(self, now_s: float) -> GateDriver:
        """As it is when its process died and another one starts."""
        return self.reopened(self.gate.frontier(), self.incarnation, now_s)

    def write(self) -> None:
        """Group commit."""
        for settled in self.gate.take_settled():
            self.settled.append(settled)
            self.journal.settled(settled)
        self.journal.commit(self.gate, self.incarnation)

    # producers

    def hello(self, producer: str, now_s: float) -> None:
        self.gate.hello(producer, now_s)
        self.write()

    def gone(self, producer: str, now_s: float) -> None:
        self.gate.producer_gone(producer, now_s)
        self.write()

    def heartbeat(self, producer: str, version: int, now_s: float) -> None:
        self.gate.heartbeat(producer, version, {}, 0, now_s)
        self.write()

    def issue(self, producer: str, version: int, now_s: float) -> Issue | Blocked:
        answer = self.gate.issue(producer, version, now_s)
        self.write()
        return answer

    def finish(self, producer: str, meta: GroupMeta, now_s: float) -> str:
        item = PutItem(meta=meta, checksum=meta.ticket, lengths=(meta.payload_bytes,))
        outcome = self._puts.put(self.gate, producer, Put(groups=(item,)), [bytes(meta.payload_bytes)], now_s)[0]
        self.write()
        return outcome

    def fail(self, producer: str, ticket: int, attempt: int, final: bool) -> None:
        self.gate.fail(producer, ticket, attempt, "reward failed", final)
        self.write()

    def serves(self, ticket: int) -> bool:
        return self.alive

    # time, supervision, learner

    def expire(self, now_s: float) -> None:
        self.gate.expire(now_s)
        self.write()

    def stop(self) -> None:
        self.gate.stop()
        self.write()

    def fence(self, incarnation: int) -> None:
        self.gate.fence(incarnation)
        self.write()

    def lease(self, step: int, incarnation: int, now_s: float, extra: int = 0) -> tuple[GroupMeta, ...] | Blocked:
        answer = self.gate.lease(step, incarnation, now_s, extra)
        self.write()
        return answer.groups_G if isinstance(answer, LeaseGranted) else answer

    def commit(self, step: int, incarnation: int, priorities: dict[int, float]) -> Frontier:
        self.gate.commit(step, incarnation, priorities)
        self.write()
        return self.gate.frontier()

    def give_back(self, step: int, incarnation: int, damaged: list[tuple[int, int, str]]) -> None:
        self.gate.return_(step, incarnation, damaged)
        self.write()

    def checkpointed(self, steps: int) -> None:
        self.journal.checkpointed(steps)
        self.write()

    def restored(self, frontier: Frontier, incarnation: int, now_s: float, keep: bool) -> GateDriver:
        """The next start of the run, from a checkpoint; without ``keep`` the queue's folder is gone."""
        if keep:
            other = self.reopened(frontier, incarnation, now_s)
            other.settled = []
            return other
        return GateDriver(self.settings, frontier, incarnation)

    # what the machine looks at

    def brokers(self) -> list[GateDriver]:
        return [self]

    def live(self) -> list[GroupRecord]:
        return list(self.gate.live())

    def status(self) -> QueueStatus:
        return self.gate.status()

    def picture(self) -> dict[str, Any]:
        """All that must be equal between a broker and one that is recovered from its rows, or before and after what changes nothing."""
        book, status = self.gate._book, msgspec.structs.asdict(self.gate.status())
        del status["blocked"]
        return {
            "state": self.gate.state(),
            "live": [_facts(record) for record in self.gate.live()],
            "status": status,
            "slots": (book.slots_ahead, self.gate._admission.index(), self.gate._admission.last_step(self.gate._admission.index())),
            "held": {name: sorted(tickets) for name, tickets in book._held.items() if tickets},
            "again": list(book._again),
            "has_said": {name: record.has_said for name, record in self.gate.fleet._records.items()},
            "draws": [book.selection.sample(3, step) for step in (0, 7)] if book.selection is not None else [],
            "settled": {record.ticket: self._settled_facts(record) for record in self.journal.records()},
            "payloads": sorted(self.store._payloads),
            "dead": bool(self.gate.fleet.obituary()),
        }

    def _settled_facts(self, record: GroupRecord) -> dict[str, Any]:
        unknown = {"state"} if record.ticket in self.store else {"state", "meta"}
        return {name: value for name, value in _facts(record).items() if name not in unknown}


def _facts(record: GroupRecord) -> dict[str, Any]:
    """Without what starts anew after a recovery, on another clock."""
    return {name: getattr(record, name) for name in GroupRecord.__slots__ if name not in ("deadline_s", "queued_s")}
