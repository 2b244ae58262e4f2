from __future__ import annotations

from asyncrl.learner.balance import partition


def loads(costs: dict[int, float], parts: tuple[tuple[int, ...], ...]) -> list[float]:
    return [sum(costs[key] for key in part) for part in parts]


def test_differencing_and_a_swap_are_even_where_the_greedy_division_ends_at_17_and_13():
    # greedy: 8 | 7, then 6 to the 7, 5 to the 8, 4 to either 13
    costs = {0: 8.0, 1: 7.0, 2: 6.0, 3: 5.0, 4: 4.0}
    parts = partition(costs, 2)
    assert parts == ((0, 1), (2, 3, 4))
    assert loads(costs, parts) == [15.0, 15.0]


def test_differencing_is_even_where_no_move_or_swap_mends_the_greedy_division():
    # greedy: {7, 3, 3} = 13 and {5, 5, 1} = 11; a swap would have to bring 1 over, and all differences of items are 2 or more
    # differences: 7-5 = 2, 5-3 = 2, 3-2 = 1, 2-1 = 1, 1-1 = 0
    costs = {0: 7.0, 1: 5.0, 2: 5.0, 3: 3.0, 4: 3.0, 5: 1.0}
    assert loads(costs, partition(costs, 2)) == [12.0, 12.0]


def test_a_single_heavy_item_stands_alone_and_the_others_share_the_rest():
    costs = {0: 1.0, 1: 1.0, 2: 10.0, 3: 1.0, 4: 1.0}
    assert partition(costs, 3) == ((2,), (0, 4), (1, 3))


def test_equal_items_go_in_order_and_parts_without_items_are_empty():
    assert partition({4: 2.0, 9: 2.0}, 3) == ((4,), (9,), ())
    assert partition({}, 2) == ((), ())


def test_one_part_holds_everything():
    assert partition({2: 1.0, 0: 5.0}, 1) == ((0, 2),)


def test_items_that_cost_nothing_are_placed_too():
    assert sorted(key for part in partition({0: 0.0, 1: 0.0, 2: 0.0}, 2) for key in part) == [0, 1, 2]
