"""The queue under any interleaving: producers, a learner, a publisher and deaths act on a :class:`Driver`; a model beside it checks.

Consumes a ``Driver``: what binds the machine to one gate, or to a gate for each shard. To bind another gate, write a driver, and a
subclass of :class:`QueueMachine` with ``drive`` that makes it. The model knows nothing but what went in and came out:

    conservation  admitted = trained + dropped + in flight, and what is settled is what was trained or dropped, after every rule
    bound         no token is older than max_staleness when its group is trained, at any use
    window        no waiting group is overtaken more than window − 1 times (``ordered`` drivers)
    once          a (ticket, use) is trained once on the line of weights that is alive, over restores to older checkpoints too
    versions      a producer's version, a ticket's version and its attempt never fall; repeats and late answers change nothing
    recovery      a driver recovered from its rows after any rule shows the same picture, and the run goes on from it
    liveness      from any state: when producers act, oldest tickets last, the learner gets six more steps, or the end of the prompts
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.errors import FencedError, QueueError, VersionError
from asyncrl.queue.messages import Frontier, QueueStatus
from asyncrl.queue.records import Blocked, Issue
from asyncrl.queue.settings import least_staleness
from asyncrl.trajectory import GroupMeta

DEADLINE_S = 50.0
DEAD_AFTER_S = 20.0
BUDGET_GROUPS = 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Numbers of one example; ``total`` prompts, None without end."""

    groups: int
    staleness: int
    window: int
    every: int
    shards: int = 1
    max_uses: int = 1
    max_queued_groups: int = 3
    total: int | None = None

    def share(self, shard: int) -> int:
        """Slots a step that a shard owes."""
        return self.groups // self.shards + (shard < self.groups % self.shards)


class Driver(Protocol):
    """One queue. Tickets are those of the whole queue; a ticket belongs to shard ``ticket % shards``."""

    ordered: ClassVar[bool]  # leases keep admission order within the window, and nothing is dropped as stale

    def hello(self, producer: str, now_s: float) -> None: ...
    def gone(self, producer: str, now_s: float) -> None: ...
    def heartbeat(self, producer: str, version: int, now_s: float) -> None: ...
    def issue(self, producer: str, version: int, now_s: float) -> Issue | Blocked: ...
    def finish(self, producer: str, meta: GroupMeta) -> str: ...
    def fail(self, producer: str, ticket: int, attempt: int, final: bool) -> None: ...
    def expire(self, now_s: float) -> None: ...
    def fence(self, incarnation: int) -> None: ...

    def lease(self, step: int, incarnation: int, now_s: float) -> tuple[GroupMeta, ...] | Blocked:
        """The batch in training order; asked twice, the same one."""
        ...

    def commit(self, step: int, incarnation: int) -> None: ...
    def give_back(self, step: int, incarnation: int) -> None: ...
    def frontiers(self) -> tuple[Frontier, ...]: ...  # of each shard, tickets counted within the shard
    def statuses(self) -> tuple[QueueStatus, ...]: ...

    def restored(self, frontiers: tuple[Frontier, ...]) -> Driver:
        """A new queue that starts from a checkpoint."""
        ...

    def recovered(self) -> Driver | None:
        """A new queue made of the rows that this one has written; None where nothing is written."""
        ...

    def picture(self) -> object:
        """All that must be equal between a queue and one recovered from its rows, or before and after what changes nothing."""
        ...


@dataclass(kw_only=True)
class Model:
    """What must be true, by what went in and came out.

    Attributes:
        trained: step of each (ticket, use) on the line of weights that is alive. uses: trained uses of live groups.
        spent: tickets that took a slot, without signal included. sampled: oldest version of each accepted group.
        overtaken: tickets leased past one that waits. asked: attempt and version of the last issue of a ticket.
    """

    shape: Shape
    trained: dict[tuple[int, int], int] = field(default_factory=dict)
    spent: dict[int, int] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)
    overtaken: dict[int, set[int]] = field(default_factory=dict)
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)

    def issued(self, issue: Issue, version: int) -> None:
        assert issue.not_before_version <= version
        assert issue.ticket not in self.spent, "a settled ticket was issued again"
        attempt, before = self.asked.get(issue.ticket, (-1, 0))
        assert issue.attempt > attempt and issue.not_before_version >= before
        self.asked[issue.ticket] = (issue.attempt, issue.not_before_version)

    def leased(self, tickets: list[int], waiting: set[int], ordered: bool) -> None:
        shards = self.shape.shards
        assert len(set(tickets)) == len(tickets) and not set(tickets) & set(self.spent)
        if not ordered:
            return
        for shard in range(shards):
            part = [ticket for ticket in tickets if ticket % shards == shard]
            assert part == sorted(part)
            for left in (ticket for ticket in waiting - set(tickets) if ticket % shards == shard):
                self.overtaken.setdefault(left, set()).update(ticket for ticket in part if ticket > left)
                assert len(self.overtaken[left]) <= self.shape.window - 1

    def returned(self, tickets: list[int]) -> None:
        for others in self.overtaken.values():
            others.difference_update(tickets)

    def committed(self, step: int, metas: tuple[GroupMeta, ...]) -> None:
        for meta in metas:
            assert 0 <= step - self.sampled[meta.ticket] <= self.shape.staleness, "a token older than the bound was trained"
            use = sum(1 for key in self.trained if key[0] == meta.ticket) if self.shape.max_uses > 1 else 0
            assert (meta.ticket, use) not in self.trained and use < self.shape.max_uses
            if meta.has_signal:
                self.trained[meta.ticket, use] = step
            if not meta.has_signal or use + 1 == self.shape.max_uses:
                self.spent[meta.ticket] = step

    def restored(self, steps: int) -> None:
        """The weights are those of ``steps`` committed steps again: what was trained later was not."""
        self.trained = {key: step for key, step in self.trained.items() if step < steps}
        self.spent = {ticket: step for ticket, step in self.spent.items() if step < steps}
        self.overtaken, self.asked = {}, {}

    def check(self, frontiers: tuple[Frontier, ...]) -> None:
        shards = self.shape.shards
        for ticket in self.spent:
            frontier, number = frontiers[ticket % shards], ticket // shards
            assert number < frontier.low or number in frontier.settled_above, "a trained group is not settled"
        last_uses = Counter(ticket for ticket, _ in self.trained)
        whole = sum(1 for ticket, uses in last_uses.items() if uses == self.shape.max_uses and ticket in self.spent)
        assert sum(frontier.trained for frontier in frontiers) == whole
        for frontier in frontiers:
            assert frontier.low + len(frontier.settled_above) == frontier.trained + sum(frontier.dropped.values())


class QueueMachine(RuleBasedStateMachine):
    """Subclasses say which queue is driven; ``rules_run`` counts over all examples."""

    rules_run: ClassVar[int] = 0
    shapes: ClassVar[st.SearchStrategy[tuple[int, int | None]]] = st.tuples(st.just(1), st.sampled_from([None, None, 7, 23]))
    max_uses: ClassVar[st.SearchStrategy[int]] = st.just(1)

    def drive(self, shape: Shape) -> Driver:
        """A new queue of that shape."""
        raise NotImplementedError

    @initialize(
        groups=st.integers(1, 6),
        staleness=st.integers(0, 4),
        window=st.integers(1, 8),
        every=st.integers(1, 4),
        producers=st.integers(1, 3),
        data=st.data(),
    )
    def start(self, groups: int, staleness: int, window: int, every: int, producers: int, data: st.DataObject) -> None:
        shards, total = data.draw(self.shapes)
        groups, every = max(groups, shards), min(every, staleness + 1)
        while least_staleness(groups // shards, window, every) > staleness:
            window -= 1
        uses = data.draw(self.max_uses)
        self.shape = Shape(groups=groups, staleness=staleness, window=window, every=every, shards=shards, max_uses=uses, total=total)
        self.driver, self.model = self.drive(self.shape), Model(shape=self.shape)
        self.now_s, self.published, self.steps, self.incarnation = 0.0, 0, 0, 0
        self.held: dict[str, list[Issue]] = {}
        self.versions: dict[str, int] = {}
        self.said: dict[str, int] = {}
        self.batch: tuple[GroupMeta, ...] = ()
        self.last_put: tuple[str, GroupMeta] | None = None
        self.checkpoints = [(0, self.driver.frontiers())]
        self.names = [f"generator-{i}" for i in range(producers)]
        for name in self.names:
            self.revive(name)

    # what each process does

    def revive(self, name: str) -> None:
        self.driver.hello(name, self.now_s)
        self.held[name] = []
        self.versions[name] = max(self.published, self.versions.get(name, 0))

    def ask(self, name: str) -> bool:
        answer = self.driver.issue(name, self.versions[name], self.now_s)
        if isinstance(answer, Blocked):
            assert answer.reason
            return False
        self.model.issued(answer, self.versions[name])
        self.held[name].append(answer)
        return True

    def put(self, name: str, position: int, signal: bool) -> str:
        issue = self.held[name].pop(position % len(self.held[name]))
        versions = {issue.not_before_version: 3, self.versions[name]: 2}
        meta = GroupMeta(
            group_id=f"g{issue.ticket}",
            ticket=issue.ticket,
            attempt=issue.attempt,
            incarnation=0,
            generator=name,
            lengths_N=(4, 4),
            prompt_lengths_N=(1, 1),
            sampled_tokens_N=(3, 3),
            rewards_N=(0.0, 1.0) if signal else (1.0, 1.0),
            tokens_by_version=versions,
            payload_bytes=10,
        )
        outcome = self.driver.finish(name, meta)
        assert outcome in ("accepted", "no_signal", "late", "duplicate")
        if outcome == "accepted":
            self.model.sampled[issue.ticket] = min(versions)
        self.last_put = (name, meta)
        return outcome

    def lease(self) -> bool:
        waiting = self.waiting()
        answer = self.driver.lease(self.steps, self.incarnation, self.now_s)
        if isinstance(answer, Blocked):
            assert answer.reason
            return False
        if self.batch:
            assert answer == self.batch, "a lease that was asked for twice is another"
            return True
        tickets = [meta.ticket for meta in answer]
        assert 1 <= len(tickets) <= self.shape.groups
        assert len(tickets) == self.shape.groups or self.shape.total is not None
        self.model.leased(tickets, waiting, self.driver.ordered)
        self.batch = answer
        return True

    def waiting(self) -> set[int]:
        """Tickets admitted, neither settled nor leased."""
        leased, found = {meta.ticket for meta in self.batch}, set[int]()
        for shard, (frontier, status) in enumerate(zip(self.driver.frontiers(), self.driver.statuses(), strict=True)):
            settled, live = set(frontier.settled_above), status.in_flight
            number = frontier.low
            while live:
                if number not in settled:
                    live -= 1
                    found.add(number * self.shape.shards + shard)
                number += 1
        return found - leased

    def commit(self) -> None:
        self.driver.commit(self.steps, self.incarnation)
        self.model.committed(self.steps, self.batch)
        before = self.driver.picture()
        self.driver.commit(self.steps, self.incarnation)
        assert self.driver.picture() == before, "a commit that was told twice changed something"
        self.batch = ()
        self.steps += 1
        self.published = self.steps - self.steps % self.shape.every
        if self.published == self.steps:
            self.checkpoints = [*self.checkpoints[-3:], (self.steps, self.driver.frontiers())]

    def name(self, which: int) -> str:
        return self.names[which % len(self.names)]

    # any order

    @rule(which=st.integers(0, 2), times=st.integers(1, 12))
    def some_ask(self, which: int, times: int) -> None:
        for _ in range(times):
            self.ask(self.name(which))

    @rule(
        which=st.integers(0, 2),
        positions=st.lists(st.integers(0, 20), min_size=1, max_size=10),
        signal=st.sampled_from([True, True, False]),
    )
    def some_finish(self, which: int, positions: list[int], signal: bool) -> None:
        for position in positions:
            if self.held[self.name(which)]:
                self.put(self.name(which), position, signal)

    @precondition(lambda self: self.last_put is not None)
    @rule()
    def a_put_is_repeated(self) -> None:
        assert self.last_put is not None
        before = self.driver.picture()
        assert self.driver.finish(*self.last_put) in ("duplicate", "late")
        assert self.driver.picture() == before, "a repeated put changed something"

    @rule(steps=st.integers(1, 3))
    def all_but_the_oldest_finish_and_are_trained(self, steps: int) -> None:
        self.run_with_stragglers(steps, patient=False)

    @rule(which=st.integers(0, 2), position=st.integers(0, 20), final=st.booleans())
    def one_fails(self, which: int, position: int, final: bool) -> None:
        held = self.held[self.name(which)]
        if held:
            issue = held.pop(position % len(held))
            self.driver.fail(self.name(which), issue.ticket, issue.attempt, final)

    @rule(which=st.integers(0, 2))
    def one_loads_the_published_weights(self, which: int) -> None:
        self.versions[self.name(which)] = max(self.published, self.versions[self.name(which)])

    @rule(which=st.integers(0, 2))
    def one_dies_and_comes_back(self, which: int) -> None:
        self.driver.gone(self.name(which), self.now_s)
        self.revive(self.name(which))

    @rule(seconds=st.sampled_from([1.0, 1.0, 19.0, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for name in self.names:
            self.driver.heartbeat(name, self.versions[name], self.now_s)
        # what expires is put late all the same, by some_finish
        self.driver.expire(self.now_s)

    @rule(which=st.integers(0, 2))
    def one_falls_silent_and_its_tickets_go_to_others(self, which: int) -> None:
        self.now_s += DEAD_AFTER_S
        for name in self.names:
            if name != self.name(which):
                self.driver.heartbeat(name, self.versions[name], self.now_s)
        self.driver.expire(self.now_s)
        self.driver.heartbeat(self.name(which), self.versions[self.name(which)], self.now_s)

    @rule()
    def learner_leases(self) -> None:
        self.lease()

    @rule()
    def learner_leases_and_commits(self) -> None:
        if self.lease():
            self.commit()

    @precondition(lambda self: self.batch)
    @rule()
    def learner_commits(self) -> None:
        self.commit()

    @precondition(lambda self: self.batch)
    @rule(killed=st.booleans())
    def learner_returns_or_is_fenced(self, killed: bool) -> None:
        self.model.returned([meta.ticket for meta in self.batch])
        if killed:
            self.incarnation += 1
            self.driver.fence(self.incarnation)
            with pytest.raises(FencedError):
                self.driver.commit(self.steps, self.incarnation - 1)
        else:
            self.driver.give_back(self.steps, self.incarnation)
        self.batch = ()

    @rule(which=st.integers(0, 2))
    def wrong_requests_are_refused_and_change_nothing(self, which: int) -> None:
        before = self.driver.picture()
        with pytest.raises(QueueError, match="steps are committed"):
            self.driver.lease(self.steps + 1, self.incarnation, self.now_s)
        with pytest.raises(VersionError):
            self.driver.issue(self.name(which), self.steps + 1, self.now_s)
        if self.last_put is not None:
            name, meta = self.last_put
            with pytest.raises(QueueError, match="was not"):
                self.driver.finish(name, _of_ticket(meta, meta.ticket + 10_000 * self.shape.shards))
        assert self.driver.picture() == before

    @rule(back=st.integers(0, 3))
    def all_die_and_the_run_is_restored(self, back: int) -> None:
        self.checkpoints = self.checkpoints[: max(1, len(self.checkpoints) - back)]
        self.steps, frontiers = self.checkpoints[-1]
        self.driver = self.driver.restored(frontiers)
        self.incarnation, self.batch, self.last_put, self.said = 0, (), None, {}
        self.model.restored(self.steps)
        # every producer joins with the weights of the checkpoint
        self.published = self.steps
        self.versions = dict.fromkeys(self.names, self.steps)
        for name in self.names:
            self.revive(name)

    @rule()
    def the_broker_dies_and_recovers(self) -> None:
        recovered = self.driver.recovered()
        if recovered is not None:
            self.driver = recovered
            for name in self.names:
                self.driver.heartbeat(name, self.versions[name], self.now_s)

    # what always holds

    @invariant()
    def counts_add_up(self) -> None:
        type(self).rules_run += 1
        for status in self.driver.statuses():
            assert status.admitted == status.trained + sum(status.dropped.values()) + status.in_flight
            assert status.in_flight == status.generating + status.queued_groups + status.leased
            if self.driver.ordered:
                assert "stale" not in status.dropped
            for name, version in status.producers.items():
                assert version >= self.said.get(name, -1), "a producer's version fell"
                self.said[name] = version
        self.model.check(self.driver.frontiers())

    @invariant()
    def a_queue_recovered_from_its_rows_is_the_same(self) -> None:
        recovered = self.driver.recovered()
        if recovered is not None:
            assert recovered.picture() == self.driver.picture()

    def teardown(self) -> None:
        """Whatever happened: from here on producers act, oldest tickets last, and the learner gets six more steps or the end."""
        if hasattr(self, "driver"):
            target = self.steps + 6
            self.run_with_stragglers(6, patient=True)
            assert self.steps >= target or self.is_over(), f"stuck: {[status.blocked for status in self.driver.statuses()]}"

    def is_over(self) -> bool:
        """Whether every prompt of a finite source is settled and the learner is told so."""
        answer = self.driver.lease(self.steps, self.incarnation, self.now_s)
        settled = sum(status.admitted - status.in_flight for status in self.driver.statuses())
        return isinstance(answer, Blocked) and answer.ended and settled == self.shape.total

    def run_with_stragglers(self, steps: int, patient: bool) -> None:
        """Finishes whatever is newest and trains what may be; the oldest ticket is finished only when nothing else moves."""
        target = self.steps + steps
        for _ in range(40 * (self.shape.groups + self.shape.window + 8)):
            moved = self.lease()
            if moved:
                self.commit()
            if self.steps >= target:
                return
            for name in self.names:
                self.versions[name] = max(self.published, self.versions[name])
                while self.ask(name):
                    moved = True
            oldest = min((issue.ticket for held in self.held.values() for issue in held), default=-1)
            for name in self.names:
                while [issue for issue in self.held[name] if issue.ticket != oldest]:
                    self.put(name, max(range(len(self.held[name])), key=lambda i: self.held[name][i].ticket), signal=True)
                    moved = True
            if moved:
                continue
            if not patient or self.is_over():
                return
            for name in self.names:
                while self.held[name]:
                    self.put(name, 0, signal=True)
            self.time_passes(1.0)


def _of_ticket(meta: GroupMeta, ticket: int) -> GroupMeta:
    return GroupMeta(**{**{name: getattr(meta, name) for name in GroupMeta.__slots__}, "ticket": ticket})
