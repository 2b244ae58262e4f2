"""The live groups in admission order, the transitions that end or repeat an attempt, and indexes that keep them cheap.

Every transition keeps ``admitted = trained + sum(dropped) + in_flight``; admission, leasing and the gate work on this book.
Nothing here walks over all live groups: counts are kept, deadlines and ages lie in heaps whose stale entries are skipped.

Source: design note, section 4.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator

from asyncrl.queue.ledger import EMPTY, Ledger
from asyncrl.queue.limiter import Limiter
from asyncrl.queue.messages import DropReason, Frontier
from asyncrl.queue.records import GroupRecord, GroupState, Settled
from asyncrl.queue.selection import MAX_PRIORITY, Selection
from asyncrl.queue.settings import GateSettings
from asyncrl.trajectory import GroupMeta

__all__ = ["Book"]

REMEMBERED = 4096
SLACK = 4


class Book:
    """Ledger and live records of one gate.

    Args:
        frontier: this shard's own.
        selection: told of every group that may be leased; None when leases go by admission. limiter: likewise of the other orders.

    Attributes:
        slots_ahead: slots of training steps that the live groups will take. inserted, sampled: groups accepted, and leased to a commit.
        attempts: of tickets that a restore opened again, the one to be issued. requeued: live tickets that a restore put ahead of those
            which it opened again, whatever their numbers.
        epoch: rises whenever a ticket that was refused may now be given.
        changed: tickets whose record changed since :meth:`take_changed`.
    """

    def __init__(
        self,
        settings: GateSettings,
        frontier: Frontier | None = None,
        selection: Selection | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        self.settings = settings
        self.limiter = limiter
        self.ledger = Ledger(frontier or EMPTY, settings.shard, settings.shards)
        self.first_version = self.ledger.steps
        self.reissued = 0
        self.replaced_this_step = 0
        self.stopping = False
        self.epoch = 0
        self.slots_ahead = 0
        self.queued_bytes = 0
        self.largest_bytes = 0
        self.inserted = 0
        self.sampled = 0.0
        self.queued_versions: Counter[int] = Counter()
        self.selection = selection
        self._live: dict[int, GroupRecord] = {}  # in admission order: that of tickets, after those that a restore put ahead
        self._counts: Counter[GroupState] = Counter()
        self._again: list[int] = []
        self._held: dict[str, dict[int, None]] = {}
        self._held_versions: Counter[int] = Counter()
        self._deadlines: list[tuple[float, int, int]] = []
        self._ages: list[tuple[float, int]] = []
        self._oldest: list[tuple[int, int]] = []
        self._changed: dict[int, None] = {}
        self._settled: list[Settled] = []
        self.attempts: dict[int, int] = {}
        self.requeued: dict[int, None] = {}
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
        return sum(self._counts[state] for state in states)

    def held_by(self, producer: str) -> list[GroupRecord]:
        """What a producer is sampling."""
        return [self._live[ticket] for ticket in self._held.get(producer, ())]

    def lowest_held_version(self) -> int | None:
        """The lowest version that a ticket which is being sampled was issued to."""
        return min(self._held_versions, default=None)

    def to_issue_again(self) -> Iterator[GroupRecord]:
        """Groups that wait for another attempt, in admission order."""
        return (self._live[ticket] for ticket in self._again)

    def oldest_queued_s(self, now_s: float) -> float:
        """How long the oldest finished group has waited."""
        while self._ages:
            queued_s, ticket = self._ages[0]
            record = self._live.get(ticket)
            if record is not None and record.finished and record.queued_s == queued_s:
                return max(0.0, now_s - queued_s)
            heapq.heappop(self._ages)
        return 0.0

    def overdue(self, now_s: float) -> list[GroupRecord]:
        """Groups whose present attempt has passed its deadline."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, ticket, attempt = heapq.heappop(self._deadlines)
            record = self._live.get(ticket)
            if record is not None and record.attempt == attempt and record.state is GroupState.GENERATING:
                late.append(record)
        self._compact()
        return late

    def postpone(self, seconds: float) -> None:
        """So much time does not count for the attempts that are being made."""
        self._deadlines = [(deadline_s + seconds, ticket, attempt) for deadline_s, ticket, attempt in self._deadlines]
        for tickets in self._held.values():
            for ticket in tickets:
                self._live[ticket].deadline_s += seconds

    def older_than(self, version: int) -> list[GroupRecord]:
        """Finished groups, not leased, with a token of a version below this one."""
        found: dict[int, GroupRecord] = {}  # a group that was queued more than once has an entry for each time
        while self._oldest and self._oldest[0][0] < version:
            oldest, ticket = heapq.heappop(self._oldest)
            record = self._live.get(ticket)
            if record is not None and record.finished and record.meta is not None and record.meta.oldest_version == oldest:
                found[ticket] = record
        return list(found.values())

    def admit(self, producer: str, version: int, now_s: float) -> GroupRecord:
        """A new group, at the end of the admission order."""
        ticket = self.ledger.admit()
        deadline_s = now_s + self.settings.ticket_deadline_s
        attempt = self.attempts.pop(ticket, 0)
        record = GroupRecord(ticket=ticket, attempt=attempt, producer=producer, version=version, deadline_s=deadline_s)
        self.insert(record)
        return record

    def insert(self, record: GroupRecord) -> None:
        """A group becomes live, in whatever state it is; those restored come in ticket order."""
        self._live[record.ticket] = record
        self.slots_ahead += self.settings.max_uses - record.uses
        self._enter(record)

    def reissue(self, record: GroupRecord, producer: str, version: int, now_s: float) -> None:
        """Another attempt at a group; it keeps its place."""
        self.reissued += 1
        self._leave(record)
        record.state, record.producer, record.version = GroupState.GENERATING, producer, version
        record.deadline_s = now_s + self.settings.ticket_deadline_s
        self._enter(record)

    def accept(self, record: GroupRecord, meta: GroupMeta, now_s: float) -> None:
        """The group was sampled."""
        self._leave(record)
        record.meta, record.state, record.queued_s = meta, GroupState.QUEUED, now_s
        self.largest_bytes = max(self.largest_bytes, meta.payload_bytes)
        self.inserted += 1
        self._enter(record)

    def lease(self, record: GroupRecord) -> None:
        """The group is with the learner."""
        self._move(record, GroupState.LEASED)

    def unlease(self, record: GroupRecord) -> None:
        """The group came back untrained, or may be used again."""
        self._move(record, GroupState.QUEUED)

    def used(self, record: GroupRecord, step: int) -> None:
        """One use of the group is in the weights; the last one settles it."""
        record.used_at = (*record.used_at, step)
        self.slots_ahead -= 1
        if record.uses < self.settings.max_uses:
            self.unlease(record)
        else:
            self.train(record)

    def advance(self) -> None:
        """One training step more is committed."""
        self.ledger.steps += 1
        self.replaced_this_step = 0
        self.epoch += 1

    def overtake(self, record: GroupRecord, number: int) -> None:
        """So many younger groups were leased before it; negative when they came back."""
        record.overtaken += number
        self._changed[record.ticket] = None

    def prioritise(self, ticket: int, priority: float) -> None:
        """The learner's own priority of a group that it will use again."""
        record = self._live.get(ticket)
        if record is None or self.selection is None:
            return
        record.priority = priority
        self._changed[ticket] = None
        if record.finished:
            self.selection.update(ticket, priority)

    def fail(self, record: GroupRecord, reason: str) -> None:
        """The present attempt failed: the ticket waits to be issued again, or is given up after ``max_attempts``.

        After a stop nothing is given up: attempts end because their generators do, and a resumed run issues the tickets again.
        """
        record.reasons.append(f"attempt {record.attempt} at {record.producer}: {reason}")
        if record.finished:  # damaged: what takes its place will be inserted in turn
            self.inserted -= 1
        if record.attempt + 1 >= self.settings.max_attempts and not self.stopping:
            self.drop(record, DropReason.DEAD_LETTER)
            return
        self._leave(record)
        record.attempt, record.meta, record.state = record.attempt + 1, None, GroupState.REISSUE
        self._enter(record)
        self.epoch += 1

    def lapse(self, record: GroupRecord) -> None:
        """A finished group is too old: dropped as stale, or settled as trained with the uses that it had."""
        self.write_off(record.uses)
        if record.uses:
            self.train(record)
        else:
            self.drop(record, DropReason.STALE)

    def write_off(self, uses: int) -> None:
        """A group goes after so many uses: those that it still owes are counted as taken."""
        if self.limiter is not None:
            self.sampled += self.limiter.write_off(uses)

    def drop(self, record: GroupRecord, reason: DropReason) -> None:
        """The group will not be trained any more."""
        self.ledger.drop(record.ticket, reason)
        self._remove(record, reason.value)

    def train(self, record: GroupRecord) -> None:
        """The group is in the weights, for the last time."""
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

    def take_changed(self) -> list[GroupRecord]:
        """Live groups that changed since the last call."""
        changed = [self._live[ticket] for ticket in self._changed if ticket in self._live]
        self._changed = {}
        return changed

    def _compact(self) -> None:
        """Drops stale heap entries once they outnumber the live ones."""
        limit = SLACK * (self.num_live + 64)
        if len(self._deadlines) > limit:
            held = (self._live[ticket] for tickets in self._held.values() for ticket in tickets)
            self._deadlines = [(record.deadline_s, record.ticket, record.attempt) for record in held]
            heapq.heapify(self._deadlines)
        if max(len(self._ages), len(self._oldest)) > limit:
            queued = [(record, record.meta) for record in self._live.values() if record.finished and record.meta is not None]
            self._ages = [(record.queued_s, record.ticket) for record, _ in queued]
            self._oldest = [(meta.oldest_version, record.ticket) for record, meta in queued]
            heapq.heapify(self._ages)
            heapq.heapify(self._oldest)

    def _move(self, record: GroupRecord, state: GroupState) -> None:
        self._leave(record)
        record.state = state
        self._enter(record)

    def _remove(self, record: GroupRecord, reason: str) -> None:
        self._leave(record)
        record.settled_at = self.ledger.steps
        del self._live[record.ticket]
        self.requeued.pop(record.ticket, None)
        self.slots_ahead -= self.settings.max_uses - record.uses
        self._settled.append(Settled(record=record, reason=reason))
        self.epoch += 1

    def _enter(self, record: GroupRecord) -> None:
        self._counts[record.state] += 1
        self._changed[record.ticket] = None
        match record.state:
            case GroupState.GENERATING:
                self._held.setdefault(record.producer, {})[record.ticket] = None
                self._held_versions[record.version] += 1
                heapq.heappush(self._deadlines, (record.deadline_s, record.ticket, record.attempt))
            case GroupState.REISSUE:
                bisect.insort(self._again, record.ticket)
            case GroupState.QUEUED:
                self._enter_queue(record)

    def _enter_queue(self, record: GroupRecord) -> None:
        assert record.meta is not None
        self.queued_bytes += record.meta.payload_bytes
        self.queued_versions.update(record.meta.tokens_by_version)
        heapq.heappush(self._ages, (record.queued_s, record.ticket))
        heapq.heappush(self._oldest, (record.meta.oldest_version, record.ticket))
        if self.selection is not None:
            priority = record.priority if record.priority >= 0.0 else reward_spread(record.meta)
            self.selection.add(record.ticket, record.meta, priority)

    def _leave(self, record: GroupRecord) -> None:
        self._counts[record.state] -= 1
        match record.state:
            case GroupState.GENERATING:
                del self._held[record.producer][record.ticket]
                _take(self._held_versions, {record.version: 1})
            case GroupState.REISSUE:
                del self._again[bisect.bisect_left(self._again, record.ticket)]
            case GroupState.QUEUED:
                assert record.meta is not None
                self.queued_bytes -= record.meta.payload_bytes
                _take(self.queued_versions, record.meta.tokens_by_version)
                if self.selection is not None:
                    self.selection.discard(record.ticket)


def _take(counts: Counter[int], numbers: dict[int, int]) -> None:
    for key, number in numbers.items():
        counts[key] -= number
        if not counts[key]:
            del counts[key]


def reward_spread(meta: GroupMeta) -> float:
    """Largest minus smallest reward of a group: its priority until the learner says otherwise; at most the largest there is."""
    return min(max(meta.rewards_N) - min(meta.rewards_N), MAX_PRIORITY)
