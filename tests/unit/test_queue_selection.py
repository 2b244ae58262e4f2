"""Who is taken for a batch, with draws checked against worked numbers and chi-square bounds under fixed seeds."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from asyncrl.errors import ConfigError, DataError, QueueError
from asyncrl.queue.records import GroupRecord, GroupState
from asyncrl.queue.selection import Freshest, Prioritised, Selection, Uniform, make_selection
from asyncrl.queue.sum_tree import SumTree
from asyncrl.trajectory import GroupMeta


def meta(ticket: int, version: int = 0) -> GroupMeta:
    return GroupMeta(
        group_id=f"g{ticket}",
        ticket=ticket,
        attempt=0,
        incarnation=0,
        generator="generator-0",
        lengths_N=(4, 4),
        prompt_lengths_N=(1, 1),
        sampled_tokens_N=(3, 3),
        rewards_N=(0.0, 1.0),
        tokens_by_version={version: 4, version + 1: 2},
        payload_bytes=10,
    )


def record(ticket: int, state: GroupState, overtaken: int = 0) -> GroupRecord:
    return GroupRecord(ticket=ticket, producer="generator-0", version=0, deadline_s=1.0, state=state, overtaken=overtaken)


def filled(selection: Selection, priorities: dict[int, float]) -> Selection:
    for ticket, priority in priorities.items():
        selection.add(ticket, meta(ticket), priority)
    return selection


def chi_square(counts: Counter[object], expected: dict[object, float]) -> float:
    assert set(counts) <= set(expected)
    return sum((counts[key] - value) ** 2 / value for key, value in expected.items())


def bound(freedom: int) -> float:
    """Chi-square value exceeded once in a million (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.753 * (2 / (9 * freedom)) ** 0.5) ** 3


# the sum tree


def test_a_point_falls_into_the_leaf_whose_span_of_weights_holds_it() -> None:
    tree = SumTree()
    for index, weight in ((7, 5), (2, 3), (1000, 2)):
        tree.set(index, weight)
    assert tree.total == 10 and len(tree) == 3
    assert [tree.find(point) for point in range(10)] == [2, 2, 2, 7, 7, 7, 7, 7, 1000, 1000]
    tree.set(7, 0)
    assert [tree.find(point) for point in range(5)] == [2, 2, 2, 1000, 1000]
    assert (tree.get(7), tree.get(2), tree.get(5)) == (0, 3, 0)


def test_an_emptied_tree_holds_no_nodes_of_tickets_gone() -> None:
    tree = SumTree()
    for index in range(5000):
        tree.set(index, index + 1)
    for index in range(5000):
        tree.set(index, 0)
    assert (tree.total, len(tree), tree.num_nodes) == (0, 0, 0)


@pytest.mark.parametrize(("index", "weight"), [(-1, 1), (0, -1)])
def test_a_negative_leaf_or_weight_is_refused(index: int, weight: int) -> None:
    with pytest.raises(DataError, match="-1"):
        SumTree().set(index, weight)


@pytest.mark.parametrize("point", [-1, 3])
def test_a_point_outside_the_total_is_refused(point: int) -> None:
    tree = SumTree()
    tree.set(4, 3)
    with pytest.raises(DataError, match=f"below 3; met {point}"):
        tree.find(point)


# freshest


def test_freshest_takes_the_newest_oldest_version_first_and_the_lowest_ticket_of_those() -> None:
    selection = Freshest()
    for ticket, version in ((0, 1), (5, 3), (4, 3), (2, 2), (9, 0)):
        selection.add(ticket, meta(ticket, version), 1.0)
    assert selection.sample(4, key=0) == [4, 5, 2, 0]
    selection.discard(5)
    selection.discard(5)
    assert selection.sample(9, key=7) == [4, 2, 0, 9]
    assert len(selection) == 4


def test_freshest_forgets_what_was_discarded_though_it_never_came_to_the_top() -> None:
    selection = Freshest()
    for ticket in range(20_000):
        selection.add(ticket, meta(ticket, version=ticket), 1.0)
        if ticket >= 10:
            selection.discard(ticket - 10)
    assert selection.num_entries <= 64
    assert selection.sample(3, key=0) == [19_999, 19_998, 19_997]


def test_freshest_knows_a_group_that_came_back_with_other_versions() -> None:
    selection = Freshest()
    selection.add(1, meta(1, version=5), 1.0)
    selection.add(2, meta(2, version=4), 1.0)
    selection.discard(1)
    selection.add(1, meta(1, version=3), 1.0)
    assert selection.sample(2, key=0) == [2, 1]


# uniform and prioritised


def test_uniform_takes_each_group_equally_often() -> None:
    selection = filled(Uniform(seed=3), {ticket: 1.0 + ticket for ticket in range(0, 60, 3)})
    counts = Counter(ticket for step in range(4000) for ticket in selection.sample(5, key=step))
    # draws without replacement vary less than independent ones, so the bound holds all the more
    assert chi_square(counts, dict.fromkeys(range(0, 60, 3), 4000 * 5 / 20)) < bound(19)


def test_uniform_batches_of_two_steps_share_no_more_groups_than_chance() -> None:
    selection = filled(Uniform(seed=1), dict.fromkeys(range(20), 1.0))
    batches = [set(selection.sample(5, key=step)) for step in range(4001)]
    shared = Counter(len(a & b) for a, b in itertools.pairwise(batches))
    ways = {0: 3003, 1: 6825, 2: 4550, 3: 1050, 4: 75, 5: 1}  # C(5, k) C(15, 5 - k), of C(20, 5) = 15504
    merged = Counter({k: n for k, n in shared.items() if k < 4} | {4: shared[4] + shared[5]})
    expected = {k: 4000 * n / 15504 for k, n in ways.items() if k < 4} | {4: 4000 * 76 / 15504}
    assert chi_square(merged, expected) < bound(4)


def test_prioritised_takes_the_first_in_proportion_to_priority_to_the_exponent() -> None:
    # exponent 0.5: weights 1, 2, 3, 4 of 10
    selection = filled(Prioritised(seed=11, exponent=0.5), {8: 1.0, 3: 4.0, 70: 9.0, 5: 16.0})
    counts = Counter(selection.sample(1, key=step)[0] for step in range(10_000))
    assert chi_square(counts, {8: 1000, 3: 2000, 70: 3000, 5: 4000}) < bound(3)


def test_prioritised_takes_pairs_without_replacement() -> None:
    weights = {0: 1, 1: 2, 2: 5}
    selection = filled(Prioritised(seed=2, exponent=1.0), {ticket: float(weight) for ticket, weight in weights.items()})
    counts = Counter(tuple(selection.sample(2, key=step)) for step in range(12_000))
    # first a, then b of the rest: w_a / 8 × w_b / (8 − w_a)
    expected = {(a, b): 12_000 * weights[a] / 8 * weights[b] / (8 - weights[a]) for a, b in itertools.permutations(weights, 2)}
    assert chi_square(counts, expected) < bound(5)


def test_prioritised_with_exponent_zero_is_uniform() -> None:
    priorities = {ticket: 10.0**ticket for ticket in range(8)}
    selection, uniform = filled(Prioritised(seed=4, exponent=0.0), priorities), filled(Uniform(seed=4), priorities)
    assert [selection.sample(3, key=step) for step in range(50)] == [uniform.sample(3, key=step) for step in range(50)]


def test_a_changed_priority_counts_from_the_next_draw_and_one_of_an_absent_group_is_ignored() -> None:
    selection = filled(Prioritised(seed=0, exponent=1.0), {1: 1e9, 2: 0.0})
    assert [selection.sample(1, key=step) for step in range(20)] == [[1]] * 20
    selection.update(1, 0.0)
    selection.update(2, 1e9)
    selection.update(3, 1e9)
    assert [selection.sample(1, key=step) for step in range(20)] == [[2]] * 20
    assert len(selection) == 2


def test_a_group_of_priority_zero_is_taken_when_no_other_is_left() -> None:
    assert filled(Prioritised(seed=0, exponent=1.0), {1: 1.0, 2: 0.0}).sample(2, key=0) == [1, 2]


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf"), 1.1e9])
def test_a_priority_out_of_range_is_refused_and_changes_nothing(priority: float) -> None:
    selection = filled(Prioritised(seed=0, exponent=1.0), {1: 1.0})
    with pytest.raises(DataError, match="priority"):
        selection.update(1, priority)
    with pytest.raises(DataError, match="ticket 2"):
        selection.add(2, meta(2), priority)
    assert len(selection) == 1 and selection.sample(2, key=0) == [1]


@pytest.mark.parametrize("exponent", [-0.1, 4.1, float("nan")])
def test_an_exponent_out_of_range_is_refused(exponent: float) -> None:
    with pytest.raises(ConfigError, match="exponent"):
        Prioritised(seed=0, exponent=exponent)


# all of them


KINDS = ["freshest", "uniform", "prioritised"]


def made(kind: str, seed: int = 0) -> Selection:
    return make_selection(kind, seed=seed, exponent=0.7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_added_once(kind: str) -> None:
    selection = filled(made(kind), {4: 1.0})
    with pytest.raises(QueueError, match="ticket 4"):
        selection.add(4, meta(4), 1.0)


@pytest.mark.parametrize("kind", ["uniform", "prioritised"])
def test_another_seed_or_step_draws_others(kind: str) -> None:
    priorities = {ticket: 1.0 + ticket for ticket in range(100)}
    draws = {tuple(filled(made(kind, seed), priorities).sample(5, key=step)) for seed in range(3) for step in range(3)}
    assert len(draws) == 9


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("uniform", [2, 1, 0, 7, 5]), ("prioritised", [4, 3, 1, 8, 7]), ("freshest", [9, 8, 7, 6, 5])],
)
def test_a_draw_is_the_same_in_every_process_and_release(kind: str, expected: list[int]) -> None:
    selection = made(kind, seed=17)
    for ticket in range(10):
        selection.add(ticket, meta(ticket, version=ticket), float(ticket))
    assert selection.sample(5, key=3) == expected


def test_an_unknown_selection_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="freshest, uniform, prioritised; met 'lifo'"):
        made("lifo")


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_64_costs_about_as_much_from_64_times_as_many_groups(kind: str) -> None:
    def cost_s(size: int) -> float:
        selection = made(kind)
        for ticket in range(10**6, 10**6 + size):
            selection.add(ticket, meta(ticket, version=ticket % 50), 1.0 + ticket % 7)
        times = []
        for step in range(10):
            start_s = time.thread_time()
            for ticket in selection.sample(64, key=step):
                selection.discard(ticket)
                selection.add(ticket, meta(ticket, version=ticket % 50), 2.0)
            times.append(time.thread_time() - start_s)
        return min(times)

    # a walk over all groups would take 64 times as long
    assert cost_s(16_384) < 8 * cost_s(256)
