"""The update state machine, step by step on a hand-held clock."""

from __future__ import annotations

import pytest

from asyncrl.errors import VersionError
from asyncrl.sync.machine import Deadlines, Phase, SyncMachine

DEADLINES = Deadlines(prepare_s=1.0, transfer_s=2.0, commit_s=3.0, hold_s=100.0)


def shown(orders):
    return [(order.name, order.update_id, order.phase and order.phase.value) for order in orders]


def bring(machine, name, update_id, now_s=0.0):
    """Answers all three phases; returns the orders that the commit set off."""
    machine.answered(name, update_id, Phase.PREPARE, now_s=now_s)
    machine.answered(name, update_id, Phase.TRANSFER, now_s=now_s)
    return machine.answered(name, update_id, Phase.COMMIT, now_s=now_s)


def test_a_version_is_visible_only_after_its_commit_was_answered():
    machine = SyncMachine(DEADLINES)
    machine.publish(1, version=4, now_s=0.0)
    assert shown(machine.join("a", now_s=0.0)) == [("a", 1, "prepare")]
    assert machine.committed_versions == {}
    assert shown(machine.answered("a", 1, Phase.PREPARE, now_s=0.0)) == [("a", 1, "transfer")]
    assert shown(machine.answered("a", 1, Phase.TRANSFER, now_s=0.0)) == [("a", 1, "commit")]
    assert machine.committed_versions == {} and not machine.settled(1)
    assert machine.answered("a", 1, Phase.COMMIT, now_s=0.0) == []
    assert machine.committed_versions == {"a": 4} and machine.settled(1)


def test_a_receiver_that_joins_before_the_first_publish_gets_it_when_it_comes():
    machine = SyncMachine(DEADLINES)
    assert machine.join("a", now_s=0.0) == []
    assert shown(machine.publish(1, version=0, now_s=5.0)) == [("a", 1, "prepare")]


def test_two_publishes_under_way_coalesce_to_the_newest():
    machine = SyncMachine(DEADLINES)
    machine.publish(1, version=0, now_s=0.0)
    machine.join("a", now_s=0.0)
    machine.publish(2, version=1, now_s=0.0)
    machine.publish(3, version=2, now_s=0.0)
    assert sorted(machine.prune()) == [2]
    assert shown(bring(machine, "a", 1)) == [("a", 3, "prepare")]
    assert sorted(machine.prune()) == [1]


def test_with_hold_every_version_is_taken_in_order_and_kept_until_then():
    machine = SyncMachine(DEADLINES, hold=True)
    machine.publish(1, version=0, now_s=0.0)
    machine.join("a", now_s=0.0)
    machine.publish(2, version=1, now_s=0.0)
    machine.publish(3, version=2, now_s=0.0)
    assert machine.prune() == [] and machine.waiting == 3
    assert shown(bring(machine, "a", 1)) == [("a", 2, "prepare")]
    assert machine.waiting == 2
    assert shown(bring(machine, "a", 2)) == [("a", 3, "prepare")]
    assert machine.prune() == [1] and machine.waiting == 1


def test_with_hold_a_receiver_that_comes_back_goes_on_where_it_stood():
    machine = SyncMachine(DEADLINES, hold=True)
    for update_id in (1, 2, 3):
        machine.publish(update_id, version=update_id - 1, now_s=0.0)
    machine.join("a", now_s=0.0)
    bring(machine, "a", 1)
    bring(machine, "a", 2)
    machine.prune()
    machine.failed("a", 3, "killed", now_s=0.0)
    assert shown(machine.join("a", now_s=0.0)) == [("a", 2, "prepare")]


def test_a_held_commit_may_wait_as_long_as_lockstep_may_but_a_first_one_may_not():
    machine = SyncMachine(DEADLINES, hold=True)
    machine.publish(1, version=0, now_s=0.0)
    machine.join("a", now_s=0.0)
    machine.answered("a", 1, Phase.PREPARE, now_s=0.0)
    machine.answered("a", 1, Phase.TRANSFER, now_s=0.0)
    assert machine.next_deadline_s() == 3.0
    machine.answered("a", 1, Phase.COMMIT, now_s=0.0)
    machine.publish(2, version=1, now_s=10.0)
    machine.answered("a", 2, Phase.PREPARE, now_s=10.0)
    machine.answered("a", 2, Phase.TRANSFER, now_s=10.0)
    assert machine.next_deadline_s() == 113.0


def test_rolling_updates_one_serving_receiver_at_a_time_and_does_not_wait_for_a_joiner():
    machine = SyncMachine(DEADLINES, rolling=True)
    machine.publish(1, version=0, now_s=0.0)
    for name in "ab":
        machine.join(name, now_s=0.0)
        bring(machine, name, 1)
    assert shown(machine.publish(2, version=1, now_s=0.0)) == [("a", 2, "prepare")]
    assert shown(machine.join("c", now_s=0.0)) == [("c", 2, "prepare")]
    assert shown(bring(machine, "a", 2)) == [("b", 2, "prepare")]
    assert bring(machine, "c", 2) == []


def test_a_missed_deadline_quarantines_one_receiver_and_the_others_go_on():
    machine = SyncMachine(DEADLINES)
    machine.publish(1, version=0, now_s=0.0)
    for name in "ab":
        machine.join(name, now_s=0.0)
    machine.answered("b", 1, Phase.PREPARE, now_s=0.5)
    assert machine.tick(now_s=0.9) == []
    (order,) = machine.tick(now_s=1.0)
    assert (order.name, order.phase) == ("a", None)
    assert machine.quarantined == {"a": "no answer to prepare of update 1 by its deadline"}
    assert shown(machine.answered("b", 1, Phase.TRANSFER, now_s=1.1)) == [("b", 1, "commit")]
    machine.answered("b", 1, Phase.COMMIT, now_s=1.2)
    assert machine.committed_versions == {"b": 0}
    assert machine.answered("a", 1, Phase.PREPARE, now_s=1.3) == [] and machine.late_answers == 1
    assert shown(machine.join("a", now_s=2.0)) == [("a", 1, "prepare")]
    assert machine.quarantined == {}


def test_rolling_goes_on_with_the_next_when_one_fails():
    machine = SyncMachine(DEADLINES, rolling=True)
    machine.publish(1, version=0, now_s=0.0)
    for name in "ab":
        machine.join(name, now_s=0.0)
        bring(machine, name, 1)
    machine.publish(2, version=1, now_s=0.0)
    assert shown(machine.failed("a", 2, "prepare failed: no memory", now_s=0.0)) == [("a", 2, None), ("b", 2, "prepare")]


def test_b31_a_published_version_that_does_not_rise_is_an_error():
    machine = SyncMachine(DEADLINES)
    machine.publish(1, version=57, now_s=0.0)
    for version in (57, 1):
        with pytest.raises(VersionError, match=f"met {version} after 57"):
            machine.publish(2, version=version, now_s=0.0)
