from __future__ import annotations

from typing import Any

import msgspec
import pytest
from learner_support import trajectory

from asyncrl.errors import DataError, VersionError
from asyncrl.learner.plan import PlanSettings, StepPlan, check_payload, cost_of, plan_step, staleness_histogram
from asyncrl.trajectory import GroupMeta, TrajectoryGroup


def meta(ticket: int, tokens: int, **fields: Any) -> GroupMeta:
    values: dict[str, Any] = {
        "prompt_lengths_N": (2, 2),
        "sampled_tokens_N": (tokens, tokens),
        "lengths_N": (2 + tokens, 2 + tokens),
        "rewards_N": (0.0, 1.0),
        "tokens_by_version": {0: 2 * tokens},
    } | fields
    return GroupMeta(group_id=f"g{ticket}", ticket=ticket, attempt=0, incarnation=0, generator="generator-0", **values)


def plan_settings(**fields: Any) -> PlanSettings:
    values: dict[str, Any] = {"replicas": 1, "mini_batches": 1, "keep_no_signal": False, "shared_prompt": True, "quadratic": 0.0} | fields
    return PlanSettings(**values)


def test_replicas_get_groups_of_equal_cost_and_the_first_the_most_expensive_one():
    # costs 2 + 2n: 12, 8, 8, 4: replica 0 gets 12 and 4, replica 1 gets 8 and 8
    groups = [meta(0, 3), meta(1, 5), meta(2, 3), meta(3, 1)]
    plan = plan_step(7, groups, plan_settings(replicas=2), recompute=False)
    assert plan.mini_batches[0].tickets_by_replica == ((1, 3), (0, 2))
    assert plan.tickets_of(1) == (0, 2)


def test_replicas_are_even_where_largest_first_to_the_least_loaded_is_not():
    # costs 2 + 2n: 16, 14, 12, 10, 8; largest first would end at 34 and 26
    plan = plan_step(0, [meta(t, n) for t, n in enumerate([7, 6, 5, 4, 3])], plan_settings(replicas=2), recompute=False)
    assert plan.mini_batches[0].tickets_by_replica == ((0, 1), (2, 3, 4))


def test_the_price_of_a_pair_goes_with_the_plan_where_there_are_replicas_to_keep_in_step():
    assert plan_step(0, [meta(0, 1)], plan_settings(replicas=2, quadratic=0.25), recompute=False).quadratic == 0.25
    assert plan_step(0, [meta(0, 1)], plan_settings(replicas=1, quadratic=0.25), recompute=False).quadratic is None


def test_a_shared_prompt_is_paid_once_and_pairs_count_what_attends():
    one = meta(0, 3)
    assert cost_of(one, plan_settings(shared_prompt=False)) == 10.0
    assert cost_of(one, plan_settings()) == 8.0
    # prompt 2*2, each sibling 3*(3 + 2*2)
    assert cost_of(one, plan_settings(quadratic=1.0)) == 8.0 + 4.0 + 2 * 21.0


def test_b25_the_denominator_counts_the_rows_of_this_update_over_all_replicas():
    groups = [meta(t, n) for t, n in enumerate([1, 2, 3, 4])]
    plan = plan_step(0, groups, plan_settings(replicas=2, mini_batches=2), recompute=False)
    assert [(mini.tokens, mini.trajectories) for mini in plan.mini_batches] == [(6, 4), (14, 4)]
    assert plan.tokens == 20


def test_groups_without_signal_are_skipped_and_the_denominator_follows():
    groups = [meta(0, 1), meta(1, 50, rewards_N=(1.0, 1.0)), meta(2, 2)]
    plan = plan_step(0, groups, plan_settings(), recompute=False)
    assert plan.skipped == (1,)
    assert (plan.mini_batches[0].tokens, plan.mini_batches[0].trajectories) == (6, 4)
    kept = plan_step(0, groups, plan_settings(keep_no_signal=True), recompute=False)
    assert kept.skipped == () and kept.tokens == 106


def test_b26_a_batch_without_signal_still_has_one_update_for_every_replica_to_run():
    plan = plan_step(0, [meta(0, 1, rewards_N=(0.0, 0.0))], plan_settings(replicas=2, mini_batches=4), recompute=False)
    assert len(plan.mini_batches) == 1
    assert plan.mini_batches[0].tickets_by_replica == ((), ())
    assert plan.tokens == 0


def test_fewer_groups_than_mini_batches_leave_none_empty():
    plan = plan_step(0, [meta(t, 1) for t in range(3)], plan_settings(mini_batches=8), recompute=False)
    assert [mini.tickets_by_replica for mini in plan.mini_batches] == [((0,),), ((1,),), ((2,),)]


def test_the_plan_depends_on_tickets_and_not_on_their_order():
    groups = [meta(t, 1 + t % 3) for t in range(9)]
    some = plan_settings(replicas=3, mini_batches=2)
    assert plan_step(0, groups, some, recompute=True) == plan_step(0, groups[::-1], some, recompute=True)


def test_the_plan_survives_the_wire():
    plan = plan_step(3, [meta(0, 1), meta(1, 2)], plan_settings(replicas=2), recompute=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_the_histogram_counts_tokens_by_lag():
    groups = [meta(0, 1, tokens_by_version={5: 3, 4: 1}), meta(1, 1, tokens_by_version={5: 2})]
    assert staleness_histogram(5, groups, 1) == {0: 5, 1: 1}


@pytest.mark.parametrize(("version", "met"), [(6, "-1"), (2, "3")])
def test_b31_a_token_of_the_future_or_beyond_the_bound_is_an_error(version: int, met: str):
    with pytest.raises(VersionError, match=f"met {met}") as caught:
        staleness_histogram(5, [meta(4, 1, tokens_by_version={version: 1})], 2)
    assert caught.value.group_id == "g4"


def test_a_payload_that_differs_from_its_metadata_is_refused():
    group = TrajectoryGroup(trajectories=(trajectory([1, 2], [3], sibling=0), trajectory([1, 2], [3], sibling=1)))
    plan = plan_step(0, [meta(0, 1)], plan_settings(), recompute=False)
    check_payload(plan, group)
    with pytest.raises(DataError, match=r"\(2, 4\); its payload holds \(2, 2\)"):
        check_payload(plan_step(0, [meta(0, 2)], plan_settings(), recompute=False), group)
