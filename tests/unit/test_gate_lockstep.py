"""Lockstep: which version samples which ticket, when a version may be left behind, and what a dropped ticket does."""

from __future__ import annotations

import pytest

from asyncrl.config import Config
from asyncrl.errors import QueueError, VersionError
from asyncrl.queue.gate import Gate
from asyncrl.queue.messages import Frontier
from asyncrl.queue.records import Blocked, Issue, LeaseGranted
from asyncrl.queue.settings import GateSettings
from asyncrl.trajectory import GroupMeta

A, B = "generator-0", "generator-1"


def new_gate(groups: int, staleness: int, total: int | None = None, frontier: Frontier | None = None, last_batch: str = "train") -> Gate:
    config = Config.model_validate(
        {
            "algorithm": {"groups_per_step": groups, "no_signal": "keep"},
            "queue": {"schedule": "lockstep", "max_staleness": staleness, "last_batch": last_batch},
        }
    )
    gate = Gate(GateSettings.from_config(config, total), frontier)
    gate.hello(A, 0.0)
    return gate


def finish(gate: Gate, issue: Issue, *versions: int) -> str:
    meta = GroupMeta(
        group_id=f"g{issue.ticket}",
        ticket=issue.ticket,
        attempt=issue.attempt,
        incarnation=0,
        generator=A,
        lengths_N=(5, 5),
        prompt_lengths_N=(2, 2),
        sampled_tokens_N=(3, 3),
        rewards_N=(1.0, 1.0),
        tokens_by_version=dict.fromkeys(versions, 3),
    )
    return gate.finish(A, meta, 0.0)


def issue(gate: Gate, version: int, producer: str = A) -> Issue | Blocked:
    return gate.issue(producer, version, 0.0)


def train(gate: Gate, step: int) -> list[int]:
    answer = gate.lease(step, 0, 0.0)
    assert isinstance(answer, LeaseGranted), answer
    gate.commit(step, 0)
    return [meta.ticket for meta in answer.groups_G]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_each_ticket_is_sampled_by_the_one_version_that_its_number_names(staleness: int) -> None:
    gate = new_gate(2, staleness)
    version, by_ticket = 0, {}
    for step in range(6):
        while True:
            answer = issue(gate, version)
            if isinstance(answer, Issue):
                assert answer.exact_version == answer.not_before_version == version
                by_ticket[answer.ticket] = version
                finish(gate, answer, version)
            elif answer.advance and version < step:
                version += 1
            else:
                break
        assert train(gate, step) == [2 * step, 2 * step + 1]
        assert gate.status().lag.consumed == {min(step, staleness): 6}
    assert by_ticket == {ticket: max(0, ticket // 2 - staleness) for ticket in by_ticket}


def test_the_synchronous_run_samples_nothing_while_the_learner_trains() -> None:
    gate = new_gate(2, 0)
    for _ in range(2):
        answer = issue(gate, 0)
        assert isinstance(answer, Issue)
        finish(gate, answer, 0)
    blocked = issue(gate, 0)
    assert isinstance(blocked, Blocked) and blocked.advance
    assert blocked.reason == "ticket 2 is sampled by version max(0, 2 // 2 - 0) = 1; met version 0"
    assert train(gate, 0) == [0, 1]
    assert isinstance(issue(gate, 1), Issue)


def test_a_version_may_not_be_left_while_another_producer_may_lose_a_ticket_of_it() -> None:
    gate = new_gate(2, 1)
    gate.hello(B, 0.0)
    held = [issue(gate, 0, B if number == 3 else A) for number in range(4)]
    for answer in held[:3]:
        assert isinstance(answer, Issue)
        finish(gate, answer, 0)
    blocked = issue(gate, 0)
    assert isinstance(blocked, Blocked) and not blocked.advance
    gate.producer_gone(B, 1.0)
    again = issue(gate, 0)
    assert isinstance(again, Issue) and (again.ticket, again.attempt, again.exact_version) == (3, 1, 0)
    finish(gate, again, 0)
    blocked = issue(gate, 0)
    assert isinstance(blocked, Blocked) and blocked.advance


def test_a_group_with_tokens_of_two_versions_is_refused() -> None:
    gate = new_gate(1, 1)
    first, second = issue(gate, 0), issue(gate, 0)
    assert isinstance(first, Issue) and isinstance(second, Issue)
    finish(gate, first, 0)
    train(gate, 0)
    with pytest.raises(VersionError, match="sampled wholly by version 0; met tokens of version 1"):
        finish(gate, second, 0, 1)


def test_a_dropped_ticket_keeps_its_slot_so_that_later_ones_keep_their_versions() -> None:
    gate = new_gate(2, 0)
    first, second = issue(gate, 0), issue(gate, 0)
    assert isinstance(first, Issue) and isinstance(second, Issue)
    gate.fail(A, first.ticket, 0, "prompt too long", final=True)
    assert isinstance(issue(gate, 0), Blocked)
    finish(gate, second, 0)
    assert train(gate, 0) == [1]
    third = issue(gate, 1)
    assert isinstance(third, Issue) and third.ticket == 2
    status = gate.status()
    assert status.admitted == 3 == status.trained + sum(status.dropped.values()) + status.in_flight


def test_a_step_whose_tickets_were_all_dropped_is_an_error_and_not_a_wait() -> None:
    gate = new_gate(1, 0)
    only = issue(gate, 0)
    assert isinstance(only, Issue)
    gate.fail(A, only.ticket, 0, "prompt too long", final=True)
    with pytest.raises(QueueError, match="all tickets 0 to 0 of step 0 were dropped"):
        gate.lease(0, 0, 0.0)


def test_a_version_that_every_producer_has_left_behind_ends_the_run_with_a_message() -> None:
    gate = new_gate(1, 1)
    first, second = issue(gate, 0), issue(gate, 0)
    assert isinstance(first, Issue) and isinstance(second, Issue)
    finish(gate, first, 0)
    train(gate, 0)
    # the generator dies with ticket 1 and joins again with the weights of step 1
    gate.hello(A, 1.0)
    assert isinstance(gate.lease(1, 0, 1.0), Blocked)
    assert isinstance(issue(gate, 1), Issue)
    with pytest.raises(VersionError, match="ticket 1 is sampled by version 0 alone, and every producer has gone on to version 1"):
        gate.lease(1, 0, 1.0)


def test_a_resumed_run_warms_up_from_the_weights_of_its_checkpoint() -> None:
    gate = new_gate(2, 2, frontier=Frontier(steps=5, low=10, settled_above=(), trained=10, dropped={}))
    for ticket in range(10, 16):  # 16 // 2 - 2 = 6 is the first version that does not exist yet
        answer = issue(gate, 5)
        assert isinstance(answer, Issue) and (answer.ticket, answer.exact_version) == (ticket, 5)
    blocked = issue(gate, 5)
    assert isinstance(blocked, Blocked) and "max(5, 16 // 2 - 2) = 6" in blocked.reason


@pytest.mark.parametrize(("last_batch", "batches"), [("train", [[0, 1], [2]]), ("drop", [[0, 1]])])
def test_the_end_of_the_prompts_gives_a_short_last_batch_or_none(last_batch: str, batches: list[list[int]]) -> None:
    gate = new_gate(2, 1, total=3, last_batch=last_batch)
    while isinstance(answer := issue(gate, 0), Issue):
        finish(gate, answer, 0)
    assert answer.advance  # nobody will ask for version 0 again
    assert [train(gate, step) for step in range(len(batches))] == batches
    assert gate.lease(len(batches), 0, 0.0) == Blocked(reason="the prompts are used up", ended=True)
    assert gate.status().in_flight == 0
