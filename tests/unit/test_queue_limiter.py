"""The sample-to-insert limiter with numbers worked out by hand: what it holds back, and which settings it refuses."""

from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError
from asyncrl.queue.limiter import Limiter


def limiter(rate: float, least: int, buffer: float, groups: int = 4, uses: int = 4) -> Limiter:
    return Limiter(rate, least, buffer, groups_per_step=groups, max_uses=uses)


def test_no_batch_before_the_least_number_of_groups_is_there() -> None:
    one_each = limiter(1.0, 10, 4.0)
    assert [one_each.may_sample(inserted, 0, 4) for inserted in (0, 4, 9, 10, 11)] == [False, False, False, True, True]


def test_at_rate_one_inserts_and_samples_stay_within_the_buffer_of_each_other() -> None:
    # balance d = I - T within 10 - 4 and 10 + 4
    one_each = limiter(1.0, 10, 4.0)
    assert [one_each.may_insert(inserted, 0) for inserted in (0, 9, 13, 14)] == [True, True, True, False]
    assert [one_each.may_insert(inserted, 4) for inserted in (17, 18)] == [True, False]
    assert [one_each.may_sample(14, sampled, 4) for sampled in (0, 4, 5)] == [True, True, False]


def test_at_rate_two_each_group_pays_for_two_samples() -> None:
    # d = 2 I - T within 12 - 5 and 12 + 5
    twice = limiter(2.0, 6, 5.0)
    assert [twice.may_insert(inserted, 0) for inserted in (5, 7, 8)] == [True, True, False]
    assert [twice.may_sample(8, sampled, 4) for sampled in (0, 5, 6)] == [True, True, False]


def test_a_rate_that_is_no_binary_fraction_is_exact_at_its_bounds() -> None:
    # 0.1 × 30 is 3.0000000000000004 in floats; d = 3 may just be reached from 29
    tenth = limiter(0.1, 10, 2.0, groups=2, uses=1)
    assert [tenth.may_insert(inserted, 0) for inserted in (28, 29, 30)] == [True, True, False]


def test_a_refusal_says_the_rule_with_the_numbers() -> None:
    one_each = limiter(1.0, 10, 4.0)
    assert one_each.insert_refusal(13, 0) == "" and one_each.sample_refusal(14, 0, 4) == ""
    assert "1 × 15 − 0 = 15" in one_each.insert_refusal(14, 0) and "14" in one_each.insert_refusal(14, 0)
    assert "9 groups" in one_each.sample_refusal(9, 0, 4) and "algorithm.groups_per_step = 10" in one_each.sample_refusal(9, 0, 4)
    assert "1 × 10 − 8 = 2" in one_each.sample_refusal(10, 4, 4) and "at least 6" in one_each.sample_refusal(10, 4, 4)


def test_a_dropped_group_counts_as_sampled_as_often_as_it_paid_for() -> None:
    twice = limiter(2.5, 6, 5.0)
    assert [twice.write_off(uses) for uses in (0, 1, 2, 3, 4)] == [2.5, 1.5, 0.5, 0.0, 0.0]


# settings that would deadlock


def test_a_buffer_too_small_for_a_batch_is_refused_with_the_least_that_lives() -> None:
    limiter(1.0, 10, 2.5)
    with pytest.raises(ConfigError, match=r"\(1 \+ 4\) / 2 = 2\.5; met 2\.4"):
        limiter(1.0, 10, 2.4)


def test_a_buffer_too_small_does_deadlock() -> None:
    # d rises to 11: one more would be above 10 + 1.4, a batch of 4 below 10 - 1.4
    assert limiter_stuck(1.0, 10, 1.4, 4)
    assert not limiter_stuck(1.0, 10, 2.5, 4)


def limiter_stuck(rate: float, least: int, buffer: float, groups: int) -> bool:
    """Whether inserts and batches, by the two inequalities alone, ever refuse each other."""
    inserted = sampled = 0
    for _ in range(10_000):
        if inserted < least or rate * (inserted + 1) - sampled <= rate * least + buffer:
            inserted += 1
        elif rate * inserted - sampled - groups >= rate * least - buffer:
            sampled += groups
        else:
            return True
    return False


def test_a_batch_of_more_distinct_groups_than_inserts_allow_is_refused() -> None:
    # 2 + 8 / 4 = 4 groups may be there before the first sample
    limiter(4.0, 2, 8.0, groups=4)
    with pytest.raises(ConfigError, match=r"2 \+ 12 / 4 = 5; met 6 groups a step"):
        limiter(4.0, 2, 12.0, groups=6)


def test_a_rate_above_the_uses_of_a_group_is_refused() -> None:
    limiter(4.0, 8, 8.0, uses=4)
    with pytest.raises(ConfigError, match=r"max_uses = 4; met 4\.5"):
        limiter(4.5, 8, 8.0, uses=4)


@pytest.mark.parametrize(
    ("rate", "least", "buffer"),
    [(0.0, 1, 9.0), (-1.0, 1, 9.0), (float("nan"), 1, 9.0), (float("inf"), 1, 9.0), (1e-7, 1, 9.0), (1.0, 0, 9.0), (1.0, 1, float("nan"))],
)
def test_numbers_without_meaning_are_refused(rate: float, least: int, buffer: float) -> None:
    with pytest.raises(ConfigError, match=r"queue|algorithm"):
        limiter(rate, least, buffer)
