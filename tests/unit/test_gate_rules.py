"""The gate's rules with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError, DataError, FencedError, ProcessDied, QueueError, VersionError
from asyncrl.queue.gate import Gate
from asyncrl.queue.messages import Frontier
from asyncrl.queue.records import Blocked, Issue, LeaseGranted
from asyncrl.queue.settings import GateSettings, check_liveness
from asyncrl.trajectory import GroupMeta

A, B = "generator-0", "generator-1"


def options(
    groups: int, staleness: int, window: int = 1, every: int = 1, no_signal: str = "replace", budget: int = 64, **queue: Any
) -> Config:
    algorithm = {"groups_per_step": groups, "no_signal": no_signal, "no_signal_budget_groups": budget}
    queue = {"max_staleness": staleness, "window": window, **queue}
    return Config.model_validate({"algorithm": algorithm, "queue": queue, "sync": {"every": every}})


def new_gate(groups: int, staleness: int, total: int | None = None, frontier: Frontier | None = None, **more: Any) -> Gate:
    gate = Gate(GateSettings.from_config(options(groups, staleness, **more), total), frontier)
    for name in (A, B):
        gate.hello(name, 0.0)
    return gate


def meta_of(issue: Issue, version: int, rewards: tuple[float, ...] = (0.0, 1.0), tokens: int = 6, producer: str = A) -> GroupMeta:
    return GroupMeta(
        group_id=f"g{issue.ticket}",
        ticket=issue.ticket,
        attempt=issue.attempt,
        incarnation=0,
        generator=producer,
        lengths_N=(5, 5),
        prompt_lengths_N=(2, 2),
        sampled_tokens_N=(3, 3),
        rewards_N=rewards,
        tokens_by_version={version: tokens},
        payload_bytes=100,
    )


def ask(gate: Gate, version: int, producer: str = A, now_s: float = 0.0) -> Issue:
    issue = gate.issue(producer, version, now_s)
    assert isinstance(issue, Issue), issue
    return issue


def ask_all(gate: Gate, version: int, producer: str = A) -> list[Issue]:
    issues = []
    while isinstance(issue := gate.issue(producer, version, 0.0), Issue):
        issues.append(issue)
    return issues


def finish(gate: Gate, *issues: Issue, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> list[str]:
    return [gate.finish(A, meta_of(issue, version, rewards)) for issue in issues]


def leased(gate: Gate, step: int) -> list[int]:
    answer = gate.lease(step, 0, 0.0)
    return [meta.ticket for meta in answer.groups_G] if isinstance(answer, LeaseGranted) else []


def conserved(gate: Gate) -> bool:
    status = gate.status()
    return status.admitted == status.trained + sum(status.dropped.values()) + status.in_flight


# admission


def test_the_first_version_gets_one_batch_more_than_the_bound_says() -> None:
    # G=4, S=2, w=1: floor(i / 4) <= 0 + 2 holds for i = 0..11
    assert [issue.ticket for issue in ask_all(new_gate(4, 2), version=0)] == list(range(12))


def test_a_window_takes_its_reserve_from_the_bound() -> None:
    # G=4, S=2, w=4: floor((i + 3) / 4) <= 2 holds for i = 0..8
    assert len(ask_all(new_gate(4, 2, window=4), version=0)) == 9


def test_a_refused_ticket_says_why_with_its_numbers() -> None:
    gate = new_gate(4, 1)
    ask_all(gate, 0)
    answer = gate.issue(A, 0, 0.0)
    assert isinstance(answer, Blocked)
    assert answer.reason == (
        "ticket 8 (index 8) may be trained at step (8 + 1 - 1) // 4 = 2, and version 0 + max_staleness 1 allows 1: waits for version 1"
    )
    assert gate.status().blocked == f"generators wait: {A}: {answer.reason}"


def test_a_dropped_group_moves_younger_ones_up() -> None:
    gate = new_gate(2, 0)
    first, _ = ask(gate, 0), ask(gate, 0)
    assert isinstance(gate.issue(A, 0, 0.0), Blocked)
    gate.fail(A, first.ticket, first.attempt, "prompt too long", final=True)
    assert ask(gate, 0).ticket == 2
    assert gate.status().dropped == {"unusable": 1} and conserved(gate)


def test_b33_a_run_resumed_at_step_50_admits_24_groups_before_the_next_publish() -> None:
    frontier = Frontier(steps=50, low=400, settled_above=(), trained=400, dropped={})
    gate = new_gate(8, 2, frontier=frontier)
    assert [issue.ticket for issue in ask_all(gate, version=50)] == list(range(400, 424))


def test_b33_a_resumed_run_counts_slots_by_steps_although_some_groups_were_dropped() -> None:
    frontier = Frontier(steps=50, low=430, settled_above=(431, 433), trained=400, dropped={"no_signal": 32})
    gate = new_gate(8, 2, frontier=frontier)
    issued = [issue.ticket for issue in ask_all(gate, version=50)]
    assert len(issued) == 24 and issued[:4] == [430, 432, 434, 435]
    assert gate.status().admitted == 432 + 24 and conserved(gate)


def test_b34_at_staleness_0_every_trained_token_is_of_the_learners_version() -> None:
    gate = new_gate(2, 0)
    for step in range(4):
        issues = ask_all(gate, step)
        assert len(issues) == 2
        finish(gate, *issues, version=step)
        assert leased(gate, step) == [2 * step, 2 * step + 1]
        # a slow learner: nothing more is sampled while it trains
        assert isinstance(gate.issue(A, step, 0.0), Blocked)
        gate.commit(step, 0)
        assert gate.status().lag.consumed == {0: 12}


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_b49_a_learner_ahead_of_its_generators_never_starves(staleness: int) -> None:
    gate = new_gate(3, staleness)
    version = 0
    for step in range(13):
        finish(gate, *ask_all(gate, version), version=version)
        assert len(leased(gate, step)) == 3
        gate.commit(step, 0)
        version = step + 1  # the generator gets new weights only when the learner is a step on
    assert gate.status().trained == 39 and gate.status().dropped == {}


def test_b49_settings_that_would_starve_are_refused_with_the_numbers() -> None:
    # k=3, w=6, G=4: 3 - 1 + ceil(5 / 4) = 4
    with pytest.raises(ConfigError, match=r"3 - 1 \+ ceil\(5 / 4\) = 4; met 3"):
        check_liveness(options(4, 3, window=6, every=3))
    check_liveness(options(4, 4, window=6, every=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "lockstep"}, "algorithm.no_signal=keep"),
        ({"schedule": "lockstep", "no_signal": "keep", "window": 2}, "queue.window=1; met 2"),
        ({"schedule": "lockstep", "no_signal": "keep", "every": 2}, "sync.every=1"),
        ({"dead_after_s": 2.0, "heartbeat_s": 1.0}, "more than twice queue.heartbeat_s"),
    ],
)
def test_settings_that_cannot_live_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_liveness(options(4, 3, **changes))


def test_groups_of_one_cannot_be_replaced_for_want_of_signal() -> None:
    config = Config.model_validate({"algorithm": {"group_size": 1}})
    with pytest.raises(ConfigError, match="group_size=1"):
        check_liveness(config)


def test_finished_groups_hold_tickets_back_but_never_those_of_the_next_batch() -> None:
    gate = new_gate(4, 2, max_queued_groups=2)
    issues = [ask(gate, 0) for _ in range(3)]
    finish(gate, *issues)
    # index 3 belongs to the next batch: with 3 of 2 groups queued it is issued all the same
    last = ask(gate, 0)
    answer = gate.issue(A, 0, 0.0)
    assert isinstance(answer, Blocked)
    assert answer.reason == "3 finished groups are queued, and queue.max_queued_groups is 2: waits for the learner"
    finish(gate, last)
    assert leased(gate, 0) == [0, 1, 2, 3]
    assert ask(gate, 0).ticket == 4


# attempts


def test_a_lost_ticket_keeps_its_place_and_goes_to_a_version_no_older() -> None:
    gate = new_gate(1, 2)
    for step in range(2):
        finish(gate, ask(gate, step), version=step)
        assert leased(gate, step) == [step]
        gate.commit(step, 0)
    young = ask(gate, 2, producer=B)
    assert gate.producer_gone(B, 1.0) == 1
    # version 1 would be within the bound at index 2, and is older than the first attempt's
    assert ask(gate, 1).ticket == 3
    again = ask(gate, 2)
    assert (again.ticket, again.attempt, again.not_before_version) == (young.ticket, 1, 2)
    assert gate.status().reissued == 1 and conserved(gate)


def test_an_attempt_past_its_deadline_is_issued_again_and_its_late_group_is_turned_away() -> None:
    gate = new_gate(2, 1, ticket_deadline_s=10.0, dead_after_s=1000.0)
    slow = ask(gate, 0)
    assert gate.expire(9.9) == []
    assert gate.expire(10.0) == [f"ticket 0, attempt 0, at {A}: not finished within queue.ticket_deadline_s = 10 s"]
    again = ask(gate, 0)
    assert (again.ticket, again.attempt) == (0, 1)
    assert finish(gate, slow, again, again) == ["late", "accepted", "duplicate"]


def test_a_group_that_fails_three_times_becomes_a_dead_letter_with_its_reasons() -> None:
    gate = new_gate(2, 1)
    for attempt in range(3):
        issue = ask(gate, 0)
        assert (issue.ticket, issue.attempt) == (0, attempt)
        gate.fail(A, 0, attempt, f"reward raised {attempt}")
    (settled,) = gate.take_settled()
    assert settled.ticket == 0 and settled.reason == "dead_letter"
    assert settled.reasons == tuple(f"attempt {n} at {A}: reward raised {n}" for n in range(3))
    assert gate.status().dropped == {"dead_letter": 1} and conserved(gate)
    assert ask(gate, 0).ticket == 1


def test_a_group_put_again_after_it_was_trained_is_a_duplicate() -> None:
    gate = new_gate(1, 1)
    issue = ask(gate, 0)
    finish(gate, issue)
    assert leased(gate, 0) == [0]
    gate.commit(0, 0)
    assert finish(gate, issue) == ["duplicate"]
    assert gate.status().trained == 1


def test_a_ticket_never_issued_or_held_by_another_is_refused() -> None:
    gate = new_gate(2, 1)
    issue = ask(gate, 0, producer=B)
    with pytest.raises(QueueError, match="ticket 7 was not"):
        gate.finish(A, meta_of(Issue(ticket=7, attempt=0, not_before_version=0, exact_version=-1), 0))
    with pytest.raises(QueueError, match=f"is generating at {B}; met attempt 0 from {A}"):
        gate.finish(A, meta_of(issue, 0))


def test_a_token_older_than_its_ticket_allows_is_refused_and_the_ticket_issued_again() -> None:
    gate = new_gate(1, 1)
    finish(gate, ask(gate, 0))
    assert leased(gate, 0) == [0]
    gate.commit(0, 0)
    issue = ask(gate, 1)
    with pytest.raises(VersionError, match=r"was issued to version 1.*met tokens of version 0"):
        gate.finish(A, meta_of(issue, 0))
    again = ask(gate, 1)
    assert (again.ticket, again.attempt) == (1, 1)
    with pytest.raises(VersionError, match=r"1 steps are committed.*version 2, which does not exist yet"):
        gate.finish(A, meta_of(again, 2))


def test_b31_a_version_that_falls_within_a_life_or_over_a_restart_is_an_error() -> None:
    gate = new_gate(1, 4)
    for step in range(3):
        finish(gate, ask(gate, step), version=step)
        assert leased(gate, step) == [step]
        gate.commit(step, 0)
    gate.heartbeat(A, 3, {3: 7}, 20, 1.0)
    with pytest.raises(VersionError, match=f"{A} said 3, now 1"):
        gate.heartbeat(A, 1, {}, 20, 1.0)
    gate.hello(A, 2.0)
    gate.heartbeat(A, 0, {}, 0, 2.0)  # before its first weights
    with pytest.raises(VersionError, match=f"{A} said 3, now 0"):
        gate.issue(A, 0, 2.0)
    assert ask(gate, 3).not_before_version == 3
    assert gate.status().generator_tokens == 20


# window


def test_b63_long_answers_are_half_of_what_is_trained() -> None:
    # half the prompts take 8 ticks, half 1; a learner step a tick as long as there is a batch
    gate = new_gate(4, 3, window=4, ticket_deadline_s=1000.0, dead_after_s=1000.0)
    running: list[tuple[int, Issue, int]] = []
    trained: list[int] = []
    step = 0
    for tick in range(600):
        running += [(tick + (8 if issue.ticket % 2 else 1), issue, step) for issue in ask_all(gate, step)]
        for due, issue, version in [entry for entry in running if entry[0] <= tick]:
            finish(gate, issue, version=version)
            running.remove((due, issue, version))
        batch = leased(gate, step)
        if batch:
            gate.commit(step, 0)
            trained += batch
            step += 1
    assert len(trained) == 4 * step and step > 100
    assert abs(sum(ticket % 2 for ticket in trained) / len(trained) - 0.5) < 0.01
    assert gate.status().dropped == {}
    assert max(gate.status().lag.consumed) <= 3


def test_a_straggler_is_overtaken_by_window_minus_one_groups_and_then_waited_for() -> None:
    gate = new_gate(1, 3, window=3)
    issues = [ask(gate, 0) for _ in range(2)]
    finish(gate, issues[1])
    assert leased(gate, 0) == [1]
    gate.commit(0, 0)
    third = ask(gate, 1)
    finish(gate, third, version=1)
    assert leased(gate, 1) == [2]
    gate.commit(1, 0)
    fourth = ask(gate, 2)
    finish(gate, fourth, version=2)
    # overtaken by 1 and 2: w - 1 = 2 times
    assert leased(gate, 2) == []
    finish(gate, issues[0])
    assert leased(gate, 2) == [0]
    gate.commit(2, 0)
    assert gate.status().lag.consumed == {2: 6}


def test_a_returned_lease_takes_its_overtaking_back() -> None:
    gate = new_gate(1, 3, window=2)
    first, second = ask(gate, 0), ask(gate, 0)
    finish(gate, second)
    for _ in range(3):
        assert leased(gate, 0) == [1]
        gate.return_(0, 0)
    finish(gate, first)
    assert leased(gate, 0) == [0]
    assert conserved(gate)


# leases


def test_asking_twice_gives_the_same_lease_though_more_groups_have_finished() -> None:
    gate = new_gate(2, 2, window=2)
    issues = [ask(gate, 0) for _ in range(4)]
    finish(gate, issues[1], issues[0])
    assert leased(gate, 0) == [0, 1]
    finish(gate, issues[2], issues[3])
    assert leased(gate, 0) == [0, 1]
    with pytest.raises(QueueError, match="0 steps are committed, so the next is step 0; met step 1"):
        gate.lease(1, 0, 0.0)
    gate.commit(0, 0)
    gate.commit(0, 0)
    assert gate.status().trained == 2 and leased(gate, 1) == [2, 3]


def test_a_commit_without_a_lease_is_refused() -> None:
    gate = new_gate(1, 1)
    finish(gate, ask(gate, 0))
    with pytest.raises(QueueError, match="step 0 was not leased"):
        gate.commit(0, 0)
    assert leased(gate, 0) == [0]
    gate.return_(0, 0)
    with pytest.raises(QueueError, match="was returned"):
        gate.commit(0, 0)


def test_a_newer_learner_fences_the_older_one_and_gets_its_groups() -> None:
    gate = new_gate(2, 1)
    finish(gate, ask(gate, 0), ask(gate, 0))
    assert leased(gate, 0) == [0, 1]
    gate.fence(1)
    assert gate.status().queued_groups == 2 and gate.status().leased == 0
    for call in (lambda: gate.commit(0, 0), lambda: gate.lease(0, 0, 0.0), lambda: gate.return_(0, 0)):
        with pytest.raises(FencedError, match="incarnation 1 has taken over"):
            call()
    answer = gate.lease(0, 1, 0.0)
    assert isinstance(answer, LeaseGranted) and [meta.ticket for meta in answer.groups_G] == [0, 1]
    gate.commit(0, 1)
    assert gate.status().trained == 2


# groups without signal


def test_groups_without_signal_are_replaced_up_to_the_budget_and_then_keep_their_slots() -> None:
    gate = new_gate(3, 1, budget=2)
    equal = (1.0, 1.0)
    outcomes = [finish(gate, ask(gate, 0), rewards=equal)[0] for _ in range(4)]
    assert outcomes == ["no_signal", "no_signal", "accepted", "accepted"]
    finish(gate, ask(gate, 0))
    assert leased(gate, 0) == [2, 3, 4]
    gate.commit(0, 0)
    status = gate.status()
    assert status.trained == 1 and status.dropped == {"no_signal": 4} and status.in_flight == 0
    # the step used three slots: the next index is 3, and the budget is there again
    later = ask_all(gate, 0)
    assert len(later) == 3
    assert finish(gate, *later, rewards=equal) == ["no_signal", "no_signal", "accepted"]
    assert status.lag.consumed == {0: 6}
    assert status.rewards_sum == 4 * 2.0 + 1.0 and status.rewards_count == 10


def test_with_no_signal_keep_every_group_is_trained() -> None:
    gate = new_gate(2, 1, no_signal="keep")
    assert finish(gate, ask(gate, 0), ask(gate, 0), rewards=(1.0, 1.0)) == ["accepted", "accepted"]
    assert leased(gate, 0) == [0, 1]
    gate.commit(0, 0)
    assert gate.status().trained == 2 and gate.status().dropped == {}


# the end


@pytest.mark.parametrize(("last_batch", "sizes", "dropped"), [("train", [4, 1], {}), ("drop", [4], {"last_batch": 1})])
def test_b53_the_last_partial_batch_is_trained_or_dropped_and_then_the_lease_says_ended(
    last_batch: str, sizes: list[int], dropped: dict[str, int]
) -> None:
    gate = new_gate(4, 1, total=5, last_batch=last_batch)
    issues = ask_all(gate, 0)
    assert len(issues) == 5
    answer = gate.issue(A, 0, 0.0)
    assert isinstance(answer, Blocked) and answer.reason == "all 5 prompts have been handed out" and not answer.ended
    finish(gate, *issues)
    for step, size in enumerate(sizes):
        assert len(leased(gate, step)) == size
        gate.commit(step, 0)
    answer = gate.lease(len(sizes), 0, 0.0)
    assert answer == Blocked(reason="the prompts are used up", ended=True)
    assert gate.status().dropped == dropped and gate.status().in_flight == 0 and conserved(gate)


def test_the_last_batch_waits_for_groups_still_being_sampled() -> None:
    gate = new_gate(4, 1, total=2, window=4)
    first, second = ask_all(gate, 0)
    finish(gate, second)
    answer = gate.lease(0, 0, 0.0)
    assert isinstance(answer, Blocked) and not answer.ended and f"ticket 0, attempt 0, is generating at {A}" in answer.reason
    finish(gate, first)
    assert leased(gate, 0) == [0, 1]


def test_after_a_stop_ready_batches_are_leased_and_then_the_lease_says_ended() -> None:
    gate = new_gate(2, 2)
    issues = [ask(gate, 0) for _ in range(3)]
    finish(gate, *issues)
    gate.stop()
    assert gate.issue(A, 0, 0.0) == Blocked(reason="the queue was stopped", ended=True)
    assert leased(gate, 0) == [0, 1]
    gate.commit(0, 0)
    answer = gate.lease(1, 0, 0.0)
    assert isinstance(answer, Blocked) and answer.ended and answer.reason.startswith("the queue was stopped; step 1 has 1 of 2 groups")
    assert gate.status().stopping and conserved(gate)


def test_attempts_that_end_because_their_generators_stop_are_not_dead_letters() -> None:
    gate = new_gate(2, 2, max_attempts=1)
    held = [ask(gate, 0) for _ in range(3)]
    gate.stop()
    gate.fail(A, held[0].ticket, 0, "its generator was stopped")
    gate.producer_gone(A, 1.0)
    status = gate.status()
    assert status.dropped == {} and status.in_flight == 3 and conserved(gate)
    assert gate.frontier().low == 0


def test_b51_a_learner_whose_producers_all_died_is_told_who_and_why_and_not_left_waiting() -> None:
    gate = new_gate(2, 1, dead_after_s=15.0)
    ask(gate, 0)
    gate.producer_gone(B, 9.0)
    gate.fail(A, 0, 0, "CUDA out of memory")
    gate.producer_gone(A, 10.0, "exit code 1")
    answer = gate.lease(0, 0, 16.0)
    assert isinstance(answer, Blocked)
    assert answer.reason.endswith(f"no producer is alive; {A}: exit code 1; before that: CUDA out of memory")
    gate.hello(A, 20.0)
    assert "no producer" not in gate.lease(0, 0, 20.0).reason
    gate.producer_gone(A, 21.0, "exit code 1")
    with pytest.raises(ProcessDied, match=f"{A}: exit code 1; none has come back within generator.start_timeout_s = 300 s"):
        gate.lease(0, 0, 20.0 + 300.1)


def test_a_damaged_frontier_is_refused() -> None:
    with pytest.raises(DataError, match="low=5 and 1 above it, but 4 trained and 0 dropped"):
        new_gate(2, 1, frontier=Frontier(steps=2, low=5, settled_above=(7,), trained=4, dropped={}))
