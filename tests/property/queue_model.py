"""What must be true of a queue, by what went in and came out alone.

Consumes what the actors of :mod:`queue_actors` see: tickets, accepted groups, batches, commits, settled groups. It shares no rule with
the gate's code but the options of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.queue.messages import Frontier
from asyncrl.queue.records import GroupRecord, Issue, Settled
from asyncrl.queue.settings import least_staleness
from asyncrl.trajectory import GroupMeta

__all__ = ["Checkpoint", "Model", "Shape"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Options of one example; ``total`` prompts, None without end; ``rate`` is queue.samples_per_insert."""

    groups: int
    staleness: int
    window: int
    every: int
    shards: int = 1
    order: str = "fifo"
    max_uses: int = 1
    rate: float = 0.0
    max_queued_groups: int = 3
    total: int | None = None

    def that_lives(self) -> Shape:
        """The nearest shape that the settings do not refuse."""
        groups, every, window, uses = max(self.groups, self.shards), min(self.every, self.staleness + 1), self.window, self.max_uses
        fifo, share = self.order == "fifo", groups // self.shards
        if uses > 1 or not fifo:
            window = 1
        while window > 1 and least_staleness(share, window, every, uses) > self.staleness:
            window -= 1
        if fifo:
            uses = min(uses, self.staleness - least_staleness(share, window, every) + 1)
        return replace(self, groups=groups, every=every, window=window, max_uses=uses, rate=0.0 if fifo else min(self.rate, uses))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a restore goes back to: the queue's frontier, and what the model knew was settled then."""

    steps: int
    frontier: Frontier
    settled: dict[int, str]


@dataclass(kw_only=True)
class Model:
    """Attributes:
    place: admission order of tickets that were issued. asked: attempt and version of the last issue of a ticket.
    sampled: attempt and metadata of the last accepted group of a ticket. uses: steps that trained a ticket, on the line of weights
    that is alive. settled: why a ticket was dropped, empty for a trained one. overtaken: tickets leased past one that waits.
    strict: whether the bound is kept by admission alone, so that nothing is ever too old.
    """

    shape: Shape
    strict: bool = True
    place: dict[int, int] = field(default_factory=dict)
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    sampled: dict[int, GroupMeta] = field(default_factory=dict)
    uses: dict[int, tuple[int, ...]] = field(default_factory=dict)
    settled: dict[int, str] = field(default_factory=dict)
    overtaken: dict[int, set[int]] = field(default_factory=dict)

    def issued(self, issue: Issue, version: int) -> None:
        assert issue.not_before_version <= version
        assert issue.ticket not in self.settled, "a settled ticket was issued again"
        attempt, before = self.asked.get(issue.ticket, (-1, 0))
        assert issue.attempt > attempt, "an attempt was issued twice"
        assert issue.not_before_version >= before
        self.asked[issue.ticket] = (issue.attempt, issue.not_before_version)
        self.place.setdefault(issue.ticket, len(self.place))

    def leased(self, batch: Sequence[GroupMeta], queued: Sequence[GroupMeta], waiting: Iterable[int]) -> None:
        """Groups were leased, while all of ``waiting`` were not, those in ``queued`` although they were finished."""
        shards, tickets = self.shape.shards, [meta.ticket for meta in batch]
        assert all(meta == self.sampled[meta.ticket] and meta.ticket not in self.settled for meta in batch)
        if self.shape.order == "freshest" and shards == 1:
            worst = max((-meta.oldest_version, meta.ticket) for meta in batch)
            assert all((-meta.oldest_version, meta.ticket) > worst for meta in queued), "a fresher group was left"
        if self.shape.order != "fifo":
            return
        for ticket in waiting:
            ahead = {other for other in tickets if other % shards == ticket % shards and self.place[other] > self.place[ticket]}
            self.overtaken.setdefault(ticket, set()).update(ahead)
            assert len(self.overtaken[ticket]) <= self.shape.window - 1, "a group was overtaken too often"

    def in_order(self, batch: Sequence[GroupMeta]) -> None:
        """The whole batch as the learner has it."""
        tickets = [meta.ticket for meta in batch]
        assert len(set(tickets)) == len(tickets)
        assert self.shape.order != "fifo" or tickets == sorted(tickets, key=self.place.__getitem__)

    def returned(self, tickets: Iterable[int]) -> None:
        gone = set(tickets)
        for others in self.overtaken.values():
            others.difference_update(gone)

    def committed(self, step: int, batch: tuple[GroupMeta, ...]) -> None:
        for meta in batch:
            assert meta == self.sampled[meta.ticket]
            assert 0 <= step - meta.oldest_version <= self.shape.staleness, "a token older than the bound was trained"
            if meta.has_signal:
                uses = self.uses.get(meta.ticket, ())
                assert step not in uses and len(uses) < self.shape.max_uses, "a group was trained too often"
                assert meta.ticket not in self.settled, "a settled group was trained"
                self.uses[meta.ticket] = (*uses, step)

    def closed(self, settled: Settled) -> None:
        """The queue says that a group is trained or dropped."""
        record, ticket = settled.record, settled.ticket
        assert ticket not in self.settled, "a ticket was settled twice"
        assert record.used_at == self.uses.get(ticket, ()), "the queue and the learner differ about what was trained"
        if not settled.reason:
            assert record.used_at and (record.uses == self.shape.max_uses or not self.strict)
        assert settled.reason != "stale" or not self.strict, "a group became too old in spite of admission"
        assert settled.reason != "last_batch"
        self.settled[ticket] = settled.reason

    def restored(self, checkpoint: Checkpoint, live: Iterable[GroupRecord], kept: bool) -> None:
        """The weights are those of the checkpoint again; ``live`` groups wait, and attempts are known if the ledger was ``kept``."""
        self.settled = dict(checkpoint.settled)
        waiting = {record.ticket: record for record in live}
        self.uses = {
            ticket: tuple(step for step in uses if step < checkpoint.steps)
            for ticket, uses in self.uses.items()
            if self.shape.max_uses == 1 or ticket in self.settled or ticket in waiting
        }
        self.uses = {ticket: uses for ticket, uses in self.uses.items() if uses}
        if self.shape.max_uses == 1:
            assert set(self.uses) <= set(self.settled), "a group that is in the weights waits again"
        for ticket, record in waiting.items():
            assert record.meta == self.sampled[ticket] and record.meta.newest_version <= checkpoint.steps
            assert record.used_at == self.uses.get(ticket, ())
        self.place = {ticket: number for number, ticket in enumerate(waiting)}
        self.asked = {ticket: (attempt, 0) for ticket, (attempt, _) in self.asked.items()} if kept else {}
        self.overtaken = {}

    def check(self, frontiers: Mapping[int, Frontier]) -> None:
        """Settled tickets and counts of the living shards."""
        shards = self.shape.shards
        for shard, frontier in frontiers.items():
            mine = {ticket for ticket in self.settled if ticket % shards == shard}
            assert mine == set(range(shard, frontier.low, shards)) | set(frontier.settled_above), "settled is not what was settled"
        if len(frontiers) < shards:
            return
        dropped: Counter[str] = Counter()
        for frontier in frontiers.values():
            dropped.update(frontier.dropped)
        del dropped["abandoned"]
        reasons = Counter(self.settled.values())
        assert sum(frontier.trained for frontier in frontiers.values()) == reasons.pop("", 0)
        assert +dropped == reasons
