"""Window, leases, groups without signal and the end of a run, with numbers worked out by hand."""

from __future__ import annotations

import pytest
from gate_setup import A, B, ask, ask_all, conserved, finish, leased, new_gate

from asyncrl.errors import DataError, FencedError, ProcessDied, QueueError
from asyncrl.queue.ledger import split_frontier
from asyncrl.queue.messages import Frontier
from asyncrl.queue.records import Blocked, Issue, LeaseGranted

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
        split_frontier(Frontier(steps=2, low=5, settled_above=(7,), trained=4, dropped={}), 0, 1)
