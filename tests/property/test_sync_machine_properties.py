"""Invariants of the update state machine under any order of publishes, joins, answers, failures and time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.sync.machine import Deadlines, SyncMachine

DEADLINES = Deadlines(prepare_s=2.0, transfer_s=3.0, commit_s=4.0, hold_s=50.0)
NAMES = ("a", "b", "c")
event = st.one_of(
    st.tuples(st.just("publish"), st.integers(1, 3)),
    st.tuples(st.just("join"), st.sampled_from(NAMES)),
    st.tuples(st.just("answer"), st.sampled_from(NAMES)),
    st.tuples(st.just("fail"), st.sampled_from(NAMES)),
    st.tuples(st.just("wait"), st.integers(1, 6)),
)


class World:
    """Receivers that answer the last order they got, and a check after every event."""

    def __init__(self, rolling, hold):
        self.machine = SyncMachine(DEADLINES, rolling=rolling, hold=hold)
        self.rolling, self.hold = rolling, hold
        self.now_s, self.update_id, self.version = 0.0, 0, -1
        self.orders, self.phases, self.served, self.versions = {}, {}, {}, {}
        self.pruned = set()

    def take(self, orders):
        for order in orders:
            if order.phase is None:
                self.orders.pop(order.name, None)
                self.served.pop(order.name, None)
            else:
                assert order.update_id not in self.pruned, "an update was freed while a receiver still needs it"
                self.orders[order.name] = order
                self.phases.setdefault((order.name, order.update_id), []).append(order.phase.value)

    def publish(self, rise):
        self.update_id, self.version = self.update_id + 1, self.version + rise
        self.versions[self.update_id] = self.version
        self.take(self.machine.publish(self.update_id, version=self.version, now_s=self.now_s))

    def join(self, name):
        self.orders.pop(name, None)
        self.served.pop(name, None)
        self.phases = {key: value for key, value in self.phases.items() if key[0] != name}
        self.take(self.machine.join(name, now_s=self.now_s))

    def answer(self, name):
        order = self.orders.pop(name, None)
        if order is None:
            return
        before = self.served.get(name)
        orders = self.machine.answered(name, order.update_id, order.phase, now_s=self.now_s)
        if order.phase.value == "commit":
            assert self.phases[name, order.update_id][-3:] == ["prepare", "transfer", "commit"]
            version = self.versions[order.update_id]
            assert before is None or version > before
            if self.hold and before is not None:
                between = [v for v in self.versions.values() if before < v < version]
                assert between == [], f"lockstep skipped {between}"
            self.served[name] = version
        self.take(orders)

    def fail(self, name):
        order = self.orders.get(name)
        if order is not None:
            self.take(self.machine.failed(name, order.update_id, "broken", now_s=self.now_s))

    def wait(self, seconds):
        self.now_s += seconds
        self.take(self.machine.tick(now_s=self.now_s))

    def check(self):
        self.pruned |= set(self.machine.prune())
        assert self.machine.committed_versions == self.served
        if self.rolling:
            assert sum(name in self.served for name in self.orders) <= 1
        deadline_s = self.machine.next_deadline_s()
        assert (deadline_s is None) == (not self.orders)
        if not self.hold:
            assert len(self.versions) - len(self.pruned) <= len(self.orders) + 1


@settings(max_examples=300, deadline=None)
@given(st.lists(event, max_size=60), st.booleans(), st.booleans())
def test_whatever_happens_versions_rise_phases_keep_their_order_and_all_who_answer_reach_the_newest(events, rolling, hold):
    world = World(rolling, hold)
    for name, argument in events:
        getattr(world, name)(argument)
        world.check()
    if not world.versions:
        return
    live = set(world.served) | set(world.orders)
    for _ in range(3 * len(NAMES) * (len(world.versions) + 1)):
        for name in NAMES:
            world.answer(name)
            world.check()
    assert world.served == dict.fromkeys(live, world.version)
