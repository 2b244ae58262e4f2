"""The gate under any interleaving: no trained token older than the bound, no straggler overtaken too often, never stuck."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.config import Config
from asyncrl.queue.gate import Gate
from asyncrl.queue.records import Blocked, Issue, LeaseGranted
from asyncrl.queue.settings import GateSettings, least_staleness
from asyncrl.trajectory import GroupMeta

DEADLINE_S = 50.0


def settings_of(groups: int, staleness: int, window: int, every: int, **queue: object) -> GateSettings:
    config = Config.model_validate(
        {
            "algorithm": {"groups_per_step": groups, "no_signal_budget_groups": 2},
            "queue": {"max_staleness": staleness, "window": window, "ticket_deadline_s": DEADLINE_S, "dead_after_s": 20.0, **queue},
            "sync": {"every": every},
        }
    )
    return GateSettings.from_config(config, None)


class GateMachine(RuleBasedStateMachine):
    """Producers, a learner and a publisher that act in any order on one gate; a model beside it checks every trained group."""

    @initialize(
        groups=st.integers(1, 6),
        staleness=st.integers(0, 4),
        window=st.integers(1, 8),
        every=st.integers(1, 4),
        producers=st.integers(1, 3),
    )
    def start(self, groups: int, staleness: int, window: int, every: int, producers: int) -> None:
        every = min(every, staleness + 1)
        while least_staleness(groups, window, every) > staleness:
            window -= 1
        self.groups, self.staleness, self.window, self.every = groups, staleness, window, every
        self.settings = settings_of(groups, staleness, window, every, max_queued_groups=3)
        self.gate = Gate(self.settings)
        self.now_s = 0.0
        self.published = 0
        self.held: dict[str, list[Issue]] = {}
        self.versions: dict[str, int] = {}
        self.sampled: dict[int, int] = {}
        self.overtaken: dict[int, set[int]] = {}
        self.settled: set[int] = set()
        self.names = [f"generator-{i}" for i in range(producers)]
        self.incarnation = 0
        self.leased: LeaseGranted | None = None
        for name in self.names:
            self.revive(name)

    # what each process may do

    def revive(self, name: str) -> None:
        self.gate.hello(name, self.now_s)
        self.held[name] = []
        self.versions[name] = max(self.published, self.versions.get(name, 0))

    def ask(self, name: str) -> bool:
        answer = self.gate.issue(name, self.versions[name], self.now_s)
        if isinstance(answer, Blocked):
            return False
        assert answer.not_before_version <= self.versions[name]
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
        outcome = self.gate.finish(name, meta, self.now_s)
        if outcome == "accepted":
            self.sampled[issue.ticket] = min(versions)
        return outcome

    def lease(self) -> bool:
        step = self.gate.frontier().steps
        live_before = set(self.live_unleased())
        answer = self.gate.lease(step, self.incarnation, self.now_s)
        if isinstance(answer, Blocked):
            return False
        if self.leased is None:
            chosen = [meta.ticket for meta in answer.groups_G]
            assert chosen == sorted(chosen) and len(set(chosen)) == self.groups
            for left in live_before - set(chosen):
                self.overtaken.setdefault(left, set()).update(t for t in chosen if t > left)
                assert len(self.overtaken[left]) <= self.window - 1
        self.leased = answer
        return True

    def live_unleased(self) -> set[int]:
        frontier = self.gate.frontier()
        high = max([frontier.low - 1, *frontier.settled_above, *self.tickets_seen()]) + 1
        settled = set(range(frontier.low)) | set(frontier.settled_above)
        leased = {meta.ticket for meta in self.leased.groups_G} if self.leased else set()
        return set(range(high)) - settled - leased

    def tickets_seen(self) -> set[int]:
        admitted = self.gate.status().admitted
        return set(range(admitted))

    def commit(self) -> None:
        assert self.leased is not None
        step = self.leased.step
        self.gate.commit(step, self.incarnation)
        for meta in self.leased.groups_G:
            assert 0 <= step - self.sampled[meta.ticket] <= self.staleness
            assert meta.ticket not in self.settled
            self.settled.add(meta.ticket)
        self.leased = None
        steps = self.gate.frontier().steps
        self.published = steps - steps % self.every

    # any order

    @rule(which=st.integers(0, 2), times=st.integers(1, 12))
    def some_ask(self, which: int, times: int) -> None:
        for _ in range(times):
            self.ask(self.names[which % len(self.names)])

    @rule(
        which=st.integers(0, 2),
        positions=st.lists(st.integers(0, 20), min_size=1, max_size=10),
        signal=st.sampled_from([True, True, False]),
    )
    def some_finish(self, which: int, positions: list[int], signal: bool) -> None:
        name = self.names[which % len(self.names)]
        for position in positions:
            if self.held[name]:
                self.put(name, position, signal)

    @rule(steps=st.integers(1, 3))
    def all_but_the_oldest_finish_and_are_trained(self, steps: int) -> None:
        self.run_with_stragglers(steps, patient=False)

    @rule(which=st.integers(0, 2), position=st.integers(0, 20), final=st.booleans())
    def one_fails(self, which: int, position: int, final: bool) -> None:
        name = self.names[which % len(self.names)]
        if self.held[name]:
            issue = self.held[name].pop(position % len(self.held[name]))
            self.gate.fail(name, issue.ticket, issue.attempt, "reward failed", final)

    @rule(which=st.integers(0, 2))
    def one_loads_the_published_weights(self, which: int) -> None:
        name = self.names[which % len(self.names)]
        self.versions[name] = max(self.published, self.versions[name])

    @rule(which=st.integers(0, 2))
    def one_dies_and_comes_back(self, which: int) -> None:
        name = self.names[which % len(self.names)]
        self.gate.producer_gone(name, self.now_s)
        self.revive(name)

    @rule(seconds=st.sampled_from([1.0, 1.0, 19.0, DEADLINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for name in self.names:
            self.gate.heartbeat(name, self.versions[name], {}, 0, self.now_s)
        self.gate.expire(self.now_s)
        # what expired is put late all the same, by one_finishes

    @rule()
    def learner_leases(self) -> None:
        self.lease()

    @rule()
    def learner_leases_and_commits(self) -> None:
        if self.lease():
            self.commit()

    @precondition(lambda self: self.leased is not None)
    @rule()
    def learner_commits(self) -> None:
        self.commit()

    @precondition(lambda self: self.leased is not None)
    @rule(killed=st.booleans())
    def learner_returns_or_is_fenced(self, killed: bool) -> None:
        assert self.leased is not None
        for meta in self.leased.groups_G:
            for others in self.overtaken.values():
                others.discard(meta.ticket)
        if killed:
            self.incarnation += 1
            self.gate.fence(self.incarnation)
        else:
            self.gate.return_(self.leased.step, self.incarnation)
        self.leased = None

    @rule()
    def all_die_and_the_run_is_restored(self) -> None:
        frontier = self.gate.frontier()
        self.gate = Gate(self.settings, frontier)
        self.incarnation = 0
        self.leased = None
        self.overtaken = {}
        # every producer joins with the weights of the checkpoint
        self.published = frontier.steps
        self.versions = dict.fromkeys(self.names, frontier.steps)
        for name in self.names:
            self.revive(name)

    # what always holds

    @invariant()
    def counts_add_up(self) -> None:
        status = self.gate.status()
        assert status.admitted == status.trained + sum(status.dropped.values()) + status.in_flight
        assert status.in_flight == status.generating + status.queued_groups + status.leased

    def teardown(self) -> None:
        """Whatever happened: from here on producers act, oldest tickets last, and the learner gets six more steps."""
        if hasattr(self, "gate"):
            target = self.gate.frontier().steps + 6
            self.run_with_stragglers(6, patient=True)
            assert self.gate.frontier().steps >= target, f"stuck: {self.gate.status().blocked}"

    def run_with_stragglers(self, steps: int, patient: bool) -> None:
        """Finishes whatever is newest and trains what may be; the oldest ticket is finished only when nothing else moves."""
        target = self.gate.frontier().steps + steps
        for _ in range(40 * (self.groups + self.window + 8)):
            moved = self.lease()
            if moved:
                self.commit()
            if self.gate.frontier().steps >= target:
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
            if not patient:
                return
            for name in self.names:
                while self.held[name]:
                    self.put(name, 0, signal=True)
            self.time_passes(1.0)


GateMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
test_gate_keeps_bound_window_and_liveness_under_any_interleaving = GateMachine.TestCase
