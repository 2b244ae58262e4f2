from __future__ import annotations

import itertools
import random

from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from asyncrl.learner.balance import partition

COSTS = st.dictionaries(st.integers(0, 10_000), st.integers(0, 60), max_size=24)


def greedy_largest_load(costs: dict[int, int], num_parts: int) -> int:
    loads = [0] * num_parts
    for cost in sorted(costs.values(), reverse=True):
        loads[loads.index(min(loads))] += cost
    return max(loads)


@examples(max_examples=100, deadline=None)
@given(costs=COSTS, num_parts=st.integers(1, 5), seed=st.integers(0, 999))
def test_every_item_lies_in_one_part_and_none_is_heavier_than_the_greedy_division_makes_it(
    costs: dict[int, int], num_parts: int, seed: int
):
    parts = partition(costs, num_parts)
    assert sorted(key for part in parts for key in part) == sorted(costs)
    loads = [sum(costs[key] for key in part) for part in parts]
    assert max(loads) <= greedy_largest_load(costs, num_parts)
    shuffled = list(costs.items())
    random.Random(seed).shuffle(shuffled)
    assert partition(dict(shuffled), num_parts) == parts


@examples(max_examples=100, deadline=None)
@given(costs=COSTS, num_parts=st.integers(2, 5))
@example(costs=dict(enumerate([59, 18, 55, 58, 43, 57, 1, 43])), num_parts=3)  # two parts equally heavy, one of which has a swap
def test_no_move_or_swap_makes_the_heaviest_part_lighter(costs: dict[int, int], num_parts: int):
    parts = partition(costs, num_parts)
    loads = [sum(costs[key] for key in part) for part in parts]
    for heavy, place in itertools.permutations(range(num_parts), 2):
        if loads[heavy] < max(loads):
            continue
        for leaves in parts[heavy]:
            for comes in [0, *(costs[key] for key in parts[place])]:
                moved = costs[leaves] - comes
                assert max(loads[heavy] - moved, loads[place] + moved) >= loads[heavy]
