"""Producers, a learner and a publisher that act on a queue, each as the real one would; the model beside them notes what they see.

Consumes a driver (:mod:`queue_drivers`, :mod:`queue_shards`); :mod:`queue_machine` says in which order they act.
"""

from __future__ import annotations

from typing import Any

from queue_drivers import GateDriver, config_of
from queue_model import Checkpoint, Model, Shape
from queue_shards import ShardedDriver

from asyncrl.queue.messages import Frontier
from asyncrl.queue.records import Blocked, GroupState, Issue
from asyncrl.queue.settings import GateSettings
from asyncrl.trajectory import GroupMeta

__all__ = ["Actors"]

KEPT_CHECKPOINTS = 4
Driver = GateDriver | ShardedDriver


class Actors:
    """Attributes:
    driver: the queue. model: what must be true of it. held: tickets that each producer is sampling. lost: groups of lives that
    ended. batch: what is leased. incarnation: of the learner; start: of this start of the run.
    """

    def begin(self, shape: Shape, producers: int) -> None:
        self.shape, self.model = shape, Model(shape=shape)
        self.model.strict = shape.order == "fifo"
        self.driver: Driver = ShardedDriver.of(shape) if shape.shards > 1 else _alone(shape)
        self.now_s, self.published, self.steps, self.incarnation, self.start_number = 0.0, 0, 0, 0, 0
        self.stopped, self.out_of_order = False, False
        self.held: dict[str, list[Issue]] = {}
        self.lost: list[tuple[str, GroupMeta]] = []
        self.versions: dict[str, int] = {}
        self.said: dict[str, int] = {}
        self.batch: tuple[GroupMeta, ...] = ()
        self.last_put: tuple[str, GroupMeta] | None = None
        empty = Frontier(steps=0, low=0, settled_above=(), trained=0, dropped={})
        self.checkpoints = [Checkpoint(steps=0, frontier=empty, settled={})]
        self.names = [f"generator-{number}" for number in range(producers)]
        for name in self.names:
            self.revive(name)

    def name(self, which: int) -> str:
        return self.names[which % len(self.names)]

    # producers

    def revive(self, name: str) -> None:
        self.lost += [(name, self.group(name, issue, True)) for issue in self.held.get(name, ())][:3]
        self.driver.hello(name, self.now_s)
        self.held[name] = []
        self.versions[name] = max(self.published, self.versions.get(name, 0))

    def ask(self, name: str) -> bool:
        answer = self.driver.issue(name, self.versions[name], self.now_s)
        if isinstance(answer, Blocked):
            assert answer.reason or not self.driver.brokers()
            return False
        self.model.issued(answer, self.versions[name])
        self.held[name].append(answer)
        return True

    def group(self, name: str, issue: Issue, signal: bool) -> GroupMeta:
        first, last = issue.not_before_version, self.versions[name]
        return GroupMeta(
            group_id=f"g{issue.ticket}",
            ticket=issue.ticket,
            attempt=issue.attempt,
            incarnation=self.start_number,
            generator=name,
            lengths_N=(4, 4),
            prompt_lengths_N=(1, 1),
            sampled_tokens_N=(3, 3),
            rewards_N=(0.0, 1.0) if signal else (1.0, 1.0),
            tokens_by_version={first: 6} if first == last else {first: 4, last: 2},
            payload_bytes=10,
        )

    def may_put(self, name: str) -> list[Issue]:
        return [issue for issue in self.held[name] if self.driver.serves(issue.ticket)]

    def put(self, name: str, issue: Issue, signal: bool) -> str:
        self.held[name].remove(issue)
        meta = self.group(name, issue, signal)
        outcome = self.driver.finish(name, meta, self.now_s)
        assert outcome in ("accepted", "no_signal", "late", "stale"), outcome
        assert outcome != "no_signal" or not signal
        if outcome == "accepted":
            self.model.sampled[issue.ticket] = meta
        self.last_put = (name, meta)
        return outcome

    def silence(self, *, but: str = "") -> None:
        """Time has passed; whoever is not silent says so, and what is overdue ends."""
        for name in self.names:
            if name != but:
                self.driver.heartbeat(name, self.versions[name], self.now_s)
        self.driver.expire(self.now_s)

    # the learner

    def states(self) -> dict[int, GroupState]:
        return {record.ticket: record.state for record in self.driver.live()}

    def lease(self) -> bool:
        before, metas = self.states(), {record.ticket: record.meta for record in self.driver.live() if record.meta is not None}
        answer = self.driver.lease(self.steps, self.incarnation, self.now_s)
        self.note_lease(before, metas)
        if isinstance(answer, Blocked):
            assert answer.reason
            return False
        if self.batch:
            assert answer == self.batch, "a lease that was asked for twice is another"
            return True
        assert 1 <= len(answer) <= self.shape.groups
        assert len(answer) == self.shape.groups or self.shape.total is not None or self.shape.shards > 1
        if self.shape.shards == 1:
            self.model.in_order(answer)
        self.batch = answer
        return True

    def note_lease(self, before: dict[int, GroupState], metas: dict[int, GroupMeta]) -> None:
        """Which groups were leased now, each shard by itself, and which came back because their shard did."""
        after, leased = self.states(), GroupState.LEASED
        self.model.returned(ticket for ticket, state in before.items() if state is leased and after.get(ticket, leased) is not leased)
        now = [ticket for ticket, state in after.items() if state is leased and before[ticket] is not leased]
        waiting = [ticket for ticket, state in after.items() if state is not leased]
        if now:
            self.model.leased([metas[ticket] for ticket in now], [metas[t] for t in waiting if after[t] is GroupState.QUEUED], waiting)

    def commit(self) -> None:
        priorities = {meta.ticket: (meta.ticket * 7 + self.steps) % 5 / 2 for meta in self.batch}
        frontier = self.driver.commit(self.steps, self.incarnation, priorities)
        self.model.committed(self.steps, self.batch)
        before = self.pictures()
        assert self.driver.commit(self.steps, self.incarnation, priorities) == frontier
        assert self.pictures() == before, "a commit that was told twice changed something"
        self.batch = ()
        self.steps += 1
        assert frontier.steps == self.steps
        self.published = self.steps - self.steps % self.shape.every
        if self.published == self.steps and (self.whole() or self.shape.max_uses == 1):
            self.save(frontier)

    def whole(self) -> bool:
        """Whether every shard lives and the learner knows it."""
        return not isinstance(self.driver, ShardedDriver) or self.driver.whole

    def save(self, frontier: Frontier) -> None:
        self.drain()
        settled = {ticket: self.model.settled.get(ticket, "") for ticket in (*range(frontier.low), *frontier.settled_above)}
        checkpoint = Checkpoint(steps=self.steps, frontier=frontier, settled=settled)
        self.checkpoints = [*self.checkpoints[1 - KEPT_CHECKPOINTS :], checkpoint]
        self.driver.checkpointed(self.checkpoints[0].steps)

    # all of them, until something is reached

    def is_over(self) -> bool:
        """Whether the learner is told that no batch will come, because every prompt is settled or a stop was asked for."""
        answer = self.driver.lease(self.steps, self.incarnation, self.now_s)
        self.drain()
        everything = len(self.model.settled) == self.shape.total or not self.whole()
        return isinstance(answer, Blocked) and answer.ended and (self.stopped or everything)

    def run_with_stragglers(self, steps: int, patient: bool, last: bool = False) -> None:
        """Finishes whatever is newest and trains what may be; one ticket is finished only when nothing else moves.

        It is the oldest that is out, or with ``last`` the one issued last, when no more could be: the bound is tightest there.
        """
        target, straggler = self.steps + steps, -1
        if last:
            for name in self.names:
                while self.ask(name):
                    pass
            straggler = max((issue.ticket for name in self.names for issue in self.may_put(name)), default=-1)
        for _ in range(40 * (self.shape.groups + self.shape.window + 8)):
            moved = self.lease()
            if moved:
                self.commit()
            if self.steps >= target:
                return
            if self.ask_and_put(straggler):
                moved = True
            if moved:
                continue
            if not patient or self.is_over():
                return
            for name in self.names:
                for issue in self.may_put(name):
                    self.put(name, issue, signal=True)
            straggler = -1
            self.now_s += 1.0
            self.silence()

    def ask_and_put(self, straggler: int) -> bool:
        """Everybody loads the published weights, asks for all that there is, and finishes all but one; whether anything happened."""
        moved = False
        for name in self.names:
            self.versions[name] = max(self.published, self.versions[name])
            while self.ask(name):
                moved = True
        out = [issue.ticket for name in self.names for issue in self.may_put(name)]
        waits = straggler if straggler in out else min(out, default=-1)
        for name in self.names:
            for issue in sorted(self.may_put(name), key=lambda issue: -issue.ticket):
                if issue.ticket != waits:
                    self.put(name, issue, signal=True)
                    moved = True
        return moved

    # what is seen of the queue

    def drain(self) -> None:
        for broker in self.driver.brokers():
            for settled in broker.settled:
                self.model.closed(settled)
            broker.settled = []

    def pictures(self) -> list[dict[str, Any]]:
        return [broker.picture() for broker in self.driver.brokers()]


def _alone(shape: Shape) -> GateDriver:
    return GateDriver(GateSettings.from_config(config_of(shape), shape.total), None, 0)
