"""Admission and attempts at the gate, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from gate_setup import A, B, ask, ask_all, conserved, finish, leased, meta_of, new_gate, options

from asyncrl.config import Config
from asyncrl.errors import ConfigError, QueueError, VersionError
from asyncrl.queue.messages import Frontier
from asyncrl.queue.records import Blocked, Issue
from asyncrl.queue.settings import check_liveness

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
    with pytest.raises(ConfigError, match=r"3 - 1 \+ ceil\(5 / 4\) \+ 1 - 1 = 4; met 3"):
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


def test_time_in_which_the_queue_held_its_clients_back_counts_for_no_deadline() -> None:
    gate = new_gate(2, 1, ticket_deadline_s=10.0, dead_after_s=1000.0)
    ask(gate, 0)
    gate.postpone(5.0, unheard=False)
    ask(gate, 0, now_s=5.0)
    gate.postpone(2.0, unheard=False)
    assert gate.expire(16.9) == []
    assert [line.split(",")[0] for line in gate.expire(17.0)] == ["ticket 0", "ticket 1"]  # 0 + 10 + 5 + 2 and 5 + 10 + 2


def test_time_in_which_nobody_was_heard_counts_for_no_silence() -> None:
    gate = new_gate(2, 1, ticket_deadline_s=1000.0, dead_after_s=10.0)
    gate.heartbeat(A, 0, {}, 0, 4.0)
    gate.postpone(3.0, unheard=True)
    assert gate.expire(12.9) == []
    assert [line.split(" is")[0] for line in gate.expire(13.0)] == [f"producer {B}"]
    assert [line.split(" is")[0] for line in gate.expire(17.0)] == [f"producer {A}"]
    gate.postpone(100.0, unheard=True)
    assert gate.fleet.empty_for_s(117.0) == 10.0  # nobody could have come back


def test_a_group_that_fails_three_times_becomes_a_dead_letter_with_its_reasons() -> None:
    gate = new_gate(2, 1)
    for attempt in range(3):
        issue = ask(gate, 0)
        assert (issue.ticket, issue.attempt) == (0, attempt)
        gate.fail(A, 0, attempt, f"reward raised {attempt}")
    (settled,) = gate.take_settled()
    assert settled.ticket == 0 and settled.reason == "dead_letter"
    assert settled.record.reasons == [f"attempt {n} at {A}: reward raised {n}" for n in range(3)]
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
        gate.finish(A, meta_of(Issue(ticket=7, attempt=0, not_before_version=0, exact_version=-1), 0), 0.0)
    with pytest.raises(QueueError, match=f"is generating at {B}; met attempt 0 from {A}"):
        gate.finish(A, meta_of(issue, 0), 0.0)


def test_a_token_older_than_its_ticket_allows_is_refused_and_the_ticket_issued_again() -> None:
    gate = new_gate(1, 1)
    finish(gate, ask(gate, 0))
    assert leased(gate, 0) == [0]
    gate.commit(0, 0)
    issue = ask(gate, 1)
    with pytest.raises(VersionError, match=r"was issued to version 1.*met tokens of version 0"):
        gate.finish(A, meta_of(issue, 0), 0.0)
    again = ask(gate, 1)
    assert (again.ticket, again.attempt) == (1, 1)
    with pytest.raises(VersionError, match=r"1 steps are committed.*version 2, which does not exist yet"):
        gate.finish(A, meta_of(again, 2), 0.0)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "uniform", "error_buffer": 2.0}, r"queue.error_buffer >= .* = 2\.5; met 2"),
        ({"order": "freshest", "max_uses": 2, "samples_per_insert": 2.5}, r"samples_per_insert=2\.5 needs queue.max_uses=3 or more"),
        ({"max_uses": 1, "samples_per_insert": 1.5}, "needs queue.max_uses=2 or more"),
    ],
)
def test_a_ratio_of_samples_to_inserts_that_would_block_is_refused_when_the_config_is_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_liveness(options(4, 3, **changes))


def test_an_order_that_drops_what_is_too_old_still_needs_groups_that_are_not() -> None:
    check_liveness(options(4, 2, every=3, order="freshest", max_uses=3))
    with pytest.raises(ConfigError, match="met 1"):
        check_liveness(options(4, 1, every=3, order="freshest"))
