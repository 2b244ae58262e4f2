"""The live groups in admission order, and the transitions that end or repeat an attempt.

Every transition keeps ``admitted = trained + sum(dropped) + in_flight``; admission, leasing and the gate work on this book.

Source: design note, section 4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from asyncrl.queue.ledger import Ledger
from asyncrl.queue.messages import DropReason, Frontier
from asyncrl.queue.records import GroupRecord, GroupState, Settled
from asyncrl.queue.settings import GateSettings

__all__ = ["Book"]

REMEMBERED = 4096


class Book:
    """Ledger and live records of one gate."""

    def __init__(self, settings: GateSettings, frontier: Frontier | None) -> None:
        self.settings = settings
        self.ledger = Ledger(frontier)
        self.first_version = self.ledger.steps
        self.reissued = 0
        self.replaced_this_step = 0
        self.stopping = False
        self._live: dict[int, GroupRecord] = {}  # insertion order is ticket order: tickets are admitted ascending
        self._settled: list[Settled] = []
        self._accepted: OrderedDict[int, int] = OrderedDict()

    @property
    def num_live(self) -> int:
        """Groups admitted, neither trained nor dropped."""
        return len(self._live)

    @property
    def exhausted(self) -> bool:
        """Whether a finite source has no further ticket."""
        total = self.settings.total_tickets
        return total is not None and self.ledger.next_ticket >= total

    def live(self) -> Iterator[GroupRecord]:
        """Live groups in admission order."""
        return iter(self._live.values())

    def get(self, ticket: int) -> GroupRecord | None:
        """The live group of a ticket."""
        return self._live.get(ticket)

    def count(self, *states: GroupState) -> int:
        """Live groups in any of these states."""
        return sum(1 for record in self._live.values() if record.state in states)

    def queued_bytes(self) -> int:
        """Bytes of finished groups that are not leased."""
        return sum(r.meta.payload_bytes for r in self._live.values() if r.finished and r.meta is not None)

    def admit(self, producer: str, version: int, now_s: float) -> GroupRecord:
        """A new group, at the end of the admission order."""
        ticket = self.ledger.admit()
        record = GroupRecord(ticket=ticket, producer=producer, version=version, deadline_s=now_s + self.settings.ticket_deadline_s)
        self._live[ticket] = record
        return record

    def reissue(self, record: GroupRecord, producer: str, version: int, now_s: float) -> None:
        """Another attempt at a group; it keeps its place."""
        self.reissued += 1
        record.state, record.producer, record.version = GroupState.GENERATING, producer, version
        record.deadline_s = now_s + self.settings.ticket_deadline_s

    def fail(self, record: GroupRecord, reason: str) -> None:
        """The present attempt failed: the ticket waits to be issued again, or is given up after ``max_attempts``.

        After a stop nothing is given up: attempts end because their generators do, and a resumed run issues the tickets again.
        """
        record.reasons.append(f"attempt {record.attempt} at {record.producer}: {reason}")
        if record.attempt + 1 >= self.settings.max_attempts and not self.stopping:
            self.drop(record, DropReason.DEAD_LETTER)
            return
        record.attempt += 1
        record.state = GroupState.REISSUE

    def drop(self, record: GroupRecord, reason: DropReason) -> None:
        """The group will never be trained."""
        self.ledger.drop(record.ticket, reason)
        self._remove(record, reason.value)

    def train(self, record: GroupRecord) -> None:
        """The group is in the weights."""
        self.ledger.train(record.ticket)
        self._remove(record, "")

    def accepted_attempt(self, ticket: int) -> int | None:
        """The attempt that was accepted for a settled ticket, as far back as is remembered."""
        return self._accepted.get(ticket)

    def remember(self, ticket: int, attempt: int) -> None:
        """Notes which attempt was accepted, to tell a duplicate from a late one."""
        self._accepted[ticket] = attempt
        while len(self._accepted) > REMEMBERED:
            self._accepted.popitem(last=False)

    def take_settled(self) -> list[Settled]:
        """Groups settled since the last call: their payloads can go."""
        settled, self._settled = self._settled, []
        return settled

    def _remove(self, record: GroupRecord, reason: str) -> None:
        del self._live[record.ticket]
        self._settled.append(Settled(ticket=record.ticket, reason=reason, reasons=tuple(record.reasons)))
