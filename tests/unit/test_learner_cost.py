from __future__ import annotations

import pytest

from asyncrl.learner.cost import Timing, analytic_ratio, fitted_ratio, work_of


def timings(*values: tuple[int, int, float]) -> list[Timing]:
    return [Timing(tokens=tokens, pairs=pairs, seconds=seconds) for tokens, pairs, seconds in values]


def test_a_pair_is_what_a_token_attends_to_and_a_shared_prompt_counts_once():
    assert work_of([3, 3], 2) == (8, 4 + 2 * 21)
    assert work_of([5, 5], 0) == (10, 50)
    assert work_of([], 0) == (0, 0)


def test_the_fit_finds_the_prices_that_made_the_times():
    # 2 ms a token, 0.01 ms a pair
    assert fitted_ratio(timings((100, 400, 0.204), (100, 2500, 0.225), (100, 10_000, 0.300))) == pytest.approx(0.005)


def test_times_that_do_not_grow_with_pairs_make_a_pair_free():
    assert fitted_ratio(timings((100, 400, 0.30), (100, 10_000, 0.29))) == 0.0


@pytest.mark.parametrize(
    "values",
    [
        ((100, 1000, 1.0), (100, 1000, 1.1)),  # one kind of pass
        ((100, 1000, 1.0), (200, 2000, 2.0)),  # pairs in step with tokens
        ((100, 1000, 1.0), (100, 10_000, 11.0)),  # all of it pairs: a token would be cheaper than nothing
        ((100, 1000, 0.0), (100, 10_000, 0.0)),
        (),
    ],
)
def test_times_that_cannot_tell_tokens_from_pairs_give_no_fit(values: tuple[tuple[int, int, float], ...]):
    assert fitted_ratio(timings(*values)) is None


def test_operation_counts_price_a_pair_at_a_sixth_of_a_hidden_unit():
    assert analytic_ratio(64) == 1 / 384
