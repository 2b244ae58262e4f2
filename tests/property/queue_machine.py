"""The queue under any interleaving: producers, a learner, a publisher and deaths act on a driver; a model beside it checks.

conservation  admitted = trained + dropped + in flight, and what is settled is what was trained or dropped, after every rule
bound         no token is older than max_staleness when its group is trained, at any use, in any order, after any death
window        no waiting group is overtaken more than window - 1 times
once          a use of a ticket is trained once on the line of weights that is alive, over restores to older checkpoints too
versions      a producer's version, a ticket's version and its attempt never fall; repeats and late answers change nothing
recovery      a broker recovered from its rows after any rule is the same in all that matters, and the run goes on from it
liveness      from any state: when producers act, oldest tickets last, the learner gets six more steps, or the end of the prompts
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from queue_actors import Actors
from queue_drivers import DEAD_AFTER_S, DEADLINE_S, GateDriver
from queue_model import Shape
from queue_shards import ShardedDriver

from asyncrl.errors import FencedError, QueueError, VersionError
from asyncrl.queue.records import Blocked, GroupState

__all__ = ["QueueMachine"]

WHICH = st.integers(0, 2)


class QueueMachine(RuleBasedStateMachine, Actors):
    """Rules: what may happen next. Subclasses say of what shape the queue is; ``rules_run`` counts over all examples."""

    rules_run: ClassVar[Counter[str]] = Counter()
    shards: ClassVar[st.SearchStrategy[int]] = st.just(1)

    @initialize(
        groups=st.integers(1, 6),
        staleness=st.integers(0, 4),
        window=st.integers(1, 8),
        every=st.integers(1, 4),
        producers=st.integers(1, 3),
        order=st.sampled_from(["fifo", "fifo", "fifo", "freshest", "uniform", "prioritised"]),
        uses=st.sampled_from([1, 1, 2, 3]),
        rate=st.sampled_from([0.0, 1.0, 1.5, 0.5]),
        total=st.sampled_from([None, None, 7, 23]),
        all_come_back=st.booleans(),
        data=st.data(),
    )
    def start(
        self,
        groups: int,
        staleness: int,
        window: int,
        every: int,
        producers: int,
        order: str,
        uses: int,
        rate: float,
        total: int | None,
        all_come_back: bool,
        data: st.DataObject,
    ) -> None:
        numbers = Shape(
            groups=groups,
            staleness=staleness,
            window=window,
            every=every,
            shards=data.draw(self.shards),
            order=order,
            max_uses=uses,
            rate=rate,
            total=total,
        )
        self.all_come_back = all_come_back
        self.begin(numbers.that_lives(), producers)

    # producers

    @rule(which=WHICH, times=st.integers(1, 12))
    def some_ask(self, which: int, times: int) -> None:
        for _ in range(times):
            self.ask(self.name(which))

    @rule(which=WHICH, positions=st.lists(st.integers(0, 20), min_size=1, max_size=10), signal=st.sampled_from([True, True, False]))
    def some_finish(self, which: int, positions: list[int], signal: bool) -> None:
        for position in positions:
            held = self.may_put(self.name(which))
            if held:
                self.put(self.name(which), held[position % len(held)], signal)

    @precondition(lambda self: self.last_put and self.driver.serves(self.last_put[1].ticket))
    @rule()
    def a_put_is_repeated(self) -> None:
        assert self.last_put is not None
        before = self.pictures()
        assert self.driver.finish(*self.last_put, self.now_s) in ("duplicate", "late")
        assert self.pictures() == before, "a repeated put changed something"

    @precondition(lambda self: self.lost)
    @rule(position=st.integers(0, 20))
    def a_former_life_puts_late(self, position: int) -> None:
        name, meta = self.lost[position % len(self.lost)]
        if self.driver.serves(meta.ticket):
            before = self.pictures()
            assert self.driver.finish(name, meta, self.now_s) in ("late", "duplicate")
            assert self.pictures() == before, "a late put changed something"

    @rule(which=WHICH, position=st.integers(0, 20), final=st.booleans())
    def one_fails(self, which: int, position: int, final: bool) -> None:
        held = self.may_put(self.name(which))
        if held:
            issue = held[position % len(held)]
            self.held[self.name(which)].remove(issue)
            self.driver.fail(self.name(which), issue.ticket, issue.attempt, final)

    @rule(which=WHICH)
    def one_loads_the_published_weights(self, which: int) -> None:
        self.versions[self.name(which)] = max(self.published, self.versions[self.name(which)])

    @rule(which=WHICH, old=st.booleans())
    def one_dies_and_comes_back(self, which: int, old: bool) -> None:
        name = self.name(which)
        self.driver.gone(name, self.now_s)
        self.revive(name)
        if old:  # it says so before its first weights have come
            self.driver.heartbeat(name, 0, self.now_s)

    # time and supervision

    @rule(seconds=st.sampled_from([1.0, 1.0, 19.0, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.silence()  # what expires is put late all the same, by some_finish

    @rule(which=WHICH)
    def one_falls_silent_and_its_tickets_go_to_others(self, which: int) -> None:
        self.now_s += DEAD_AFTER_S
        self.silence(but=self.name(which))
        self.driver.heartbeat(self.name(which), self.versions[self.name(which)], self.now_s)

    @rule(chance=st.integers(0, 20))
    def a_stop_is_asked_for(self, chance: int) -> None:
        if chance == 20 and self.whole():
            self.driver.stop()
            self.stopped = True
            answer = self.driver.issue(self.names[0], self.versions[self.names[0]], self.now_s)
            assert isinstance(answer, Blocked) and answer.ended

    # the learner

    @rule(steps=st.integers(1, 3), last=st.booleans())
    def all_but_one_finish_and_are_trained(self, steps: int, last: bool) -> None:
        self.run_with_stragglers(steps, patient=False, last=last)

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
    @rule(damaged=st.lists(st.integers(0, 5), max_size=2))
    def learner_returns(self, damaged: list[int]) -> None:
        bad = [self.batch[position] for position in {position % len(self.batch) for position in damaged}]
        self.model.returned(meta.ticket for meta in self.batch)
        self.driver.give_back(self.steps, self.incarnation, [(meta.ticket, meta.attempt, "checksum differs") for meta in bad])
        self.nothing_is_leased()

    @precondition(lambda self: self.batch and self.whole())
    @rule()
    def learner_is_fenced(self) -> None:
        self.model.returned(meta.ticket for meta in self.batch)
        self.incarnation += 1
        self.driver.fence(self.incarnation)
        for broker in self.driver.brokers():
            with pytest.raises(FencedError):
                broker.commit(self.steps, self.incarnation - 1, {})
        self.nothing_is_leased()

    def nothing_is_leased(self) -> None:
        self.batch = ()
        if self.whole():  # a shard that the learner takes for dead is told when it is heard again
            assert not any(broker.status().leased for broker in self.driver.brokers())

    @rule(which=WHICH)
    def wrong_requests_are_refused_and_change_nothing(self, which: int) -> None:
        before, broker = self.pictures(), self.driver.brokers()[0]
        with pytest.raises(QueueError, match="steps are committed"):
            broker.lease(self.steps + 1, self.incarnation, self.now_s)
        with pytest.raises(VersionError):
            broker.issue(self.name(which), -1, self.now_s)
        if self.shape.shards == 1:
            with pytest.raises(VersionError):
                broker.issue(self.name(which), self.steps + 1, self.now_s)
        if self.batch:
            with pytest.raises(QueueError, match="priorit"):
                broker.commit(self.steps, self.incarnation, {self.batch[0].ticket: float("nan")})
        if self.last_put is not None and self.driver.serves(self.last_put[1].ticket):
            name, meta = self.last_put
            unknown = type(meta)(**{n: getattr(meta, n) for n in type(meta).__slots__} | {"ticket": meta.ticket + 10_080})
            assert "was not" in self.driver.finish(name, unknown, self.now_s)
        assert self.pictures() == before

    # deaths

    @rule(back=st.integers(0, 3), keep=st.sampled_from([True, True, True, False]))
    def all_die_and_the_run_is_restored(self, back: int, keep: bool) -> None:
        self.drain()
        self.checkpoints = self.checkpoints[: max(1, len(self.checkpoints) - back)]
        checkpoint = self.checkpoints[-1]
        self.start_number += 1
        self.incarnation = max(self.incarnation + 1, self.start_number) if keep else self.start_number
        self.start_number = self.incarnation
        self.driver = self.driver.restored(checkpoint.frontier, self.incarnation, self.now_s, keep)
        self.steps, self.published, self.batch, self.last_put, self.said, self.stopped = (
            checkpoint.steps,
            checkpoint.steps,
            (),
            None,
            {},
            False,
        )
        self.model.restored(checkpoint, self.driver.live(), keep)
        self.model.strict = self.shape.order == "fifo" and not (keep and self.out_of_order)
        self.out_of_order = keep
        # every producer joins with the weights of the checkpoint
        self.held, self.lost, self.versions = {}, [], dict.fromkeys(self.names, self.steps)
        for name in self.names:
            self.revive(name)

    @precondition(lambda self: self.shape.shards == 1)
    @rule()
    def the_broker_dies_and_recovers(self) -> None:
        self.drain()
        self.driver = self.driver.brokers()[0].recovered(self.now_s)

    @precondition(lambda self: self.shape.shards > 1 and self.whole())
    @rule(shard=WHICH, moment=st.sampled_from(["now", "lease", "before commit", "after commit", "return"]))
    def a_shard_dies(self, shard: int, moment: str) -> None:
        assert isinstance(self.driver, ShardedDriver)
        self.model.strict, self.out_of_order = False, True
        self.driver.dying = (shard % self.shape.shards, moment)
        if moment == "now":
            self.driver.die(shard % self.shape.shards)

    @precondition(lambda self: self.shape.shards > 1 and self.whole())
    @rule(
        shard=WHICH,
        moment=st.sampled_from(["now", "lease", "before commit", "after commit"]),
        steps=st.integers(1, 3),
        then=st.sampled_from(["stays dead", "comes back", "comes back to a lease", "all die"]),
    )
    def a_shard_dies_and_the_learner_goes_on(self, shard: int, moment: str, steps: int, then: str) -> None:
        self.a_shard_dies(shard, moment)
        self.run_with_stragglers(steps, patient=True)
        if then == "comes back to a lease":
            self.ask_and_put(-1)
            self.lease()
        if then == "all die":
            self.all_die_and_the_run_is_restored(0, keep=True)
        elif then != "stays dead":
            self.dead_shards_come_back()
            self.lease()

    @precondition(lambda self: self.shape.shards > 1)
    @rule()
    def dead_shards_come_back(self) -> None:
        assert isinstance(self.driver, ShardedDriver)
        for shard in range(self.shape.shards):
            self.driver.revive(shard, self.now_s)

    # what always holds

    @invariant()
    def counts_add_up(self) -> None:
        self.drain()
        frontiers = {}
        for broker in self.driver.brokers():
            status = broker.status()
            assert status.admitted == status.trained + sum(status.dropped.values()) + status.in_flight
            assert status.in_flight == status.generating + status.queued_groups + status.leased
            assert broker.log.places == {p.place.offset for p in broker.store._payloads.values() if p.place}, "payload is lost or leaks"
            frontiers[broker.settings.shard] = broker.gate.frontier()
            self.limiter_counts_what_is_there(broker)
            for name, version in status.producers.items():
                assert self.shape.shards > 1 or version >= self.said.get(name, -1), "a producer's version fell"
                self.said[name] = version
        self.model.check(frontiers)
        type(self).rules_run["rules"] += 1

    def limiter_counts_what_is_there(self, broker: GateDriver) -> None:
        """What its liveness rests on: a group that is gone counts as sampled as often as it paid for."""
        state, rate, status = broker.gate.state(), self.shape.rate or self.shape.max_uses, broker.status()
        if self.shape.order != "fifo":
            assert rate * state.inserted - state.sampled <= rate * (status.queued_groups + status.leased) + 1e-6

    @invariant()
    def overtaking_is_counted(self) -> None:
        if self.shape.shards == 1 and self.shape.order == "fifo":
            for record in self.driver.live():
                if record.state is not GroupState.LEASED:
                    assert record.overtaken == len(self.model.overtaken.get(record.ticket, ()))

    @invariant()
    def a_broker_recovered_from_its_rows_is_the_same(self) -> None:
        for broker in self.driver.brokers():
            found, there = broker.recovered(self.now_s).picture(), broker.picture()
            differs = {key: (value, there[key]) for key, value in found.items() if value != there[key]}
            assert not differs, f"a recovered broker is another: {differs}"

    def teardown(self) -> None:
        """Whatever happened: from here on producers act, oldest tickets last, and the learner gets six more steps or the end."""
        if not hasattr(self, "driver"):
            return
        if isinstance(self.driver, ShardedDriver):
            self.driver.dying = (-1, "")
            if self.all_come_back:
                self.dead_shards_come_back()
        target = self.steps + 6
        self.run_with_stragglers(6, patient=True)
        assert self.steps >= target or self.is_over(), f"stuck: {[broker.status().blocked for broker in self.driver.brokers()]}"
        type(self).rules_run["examples"] += 1
        type(self).rules_run[self.shape.order] += 1
