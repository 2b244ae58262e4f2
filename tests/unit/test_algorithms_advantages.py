from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.algorithms import group_advantages
from asyncrl.errors import ConfigError, DataError


def test_grpo_divides_by_the_sample_standard_deviation():
    # mean 0.5, squares 4 * 0.25, sqrt(1 / 3) = 0.57735
    found = group_advantages(["a"] * 4, [0, 1, 2, 3], [1.0, 0.0, 1.0, 0.0], "grpo")
    np.testing.assert_allclose(found.values_N, np.array([0.5, -0.5, 0.5, -0.5]) / math.sqrt(1 / 3), rtol=1e-15)
    assert found.has_signal_N.all()


def test_centered_takes_the_mean_off_and_leave_one_out_the_mean_of_the_others():
    rewards = [3.0, 0.0, 0.0]
    assert group_advantages(["a"] * 3, [0, 1, 2], rewards, "centered").values_N.tolist() == [2.0, -1.0, -1.0]
    # 3 - 0, 0 - 1.5, 0 - 1.5
    assert group_advantages(["a"] * 3, [0, 1, 2], rewards, "leave_one_out").values_N.tolist() == [3.0, -1.5, -1.5]


@pytest.mark.parametrize("kind", ["grpo", "centered", "leave_one_out"])
def test_b12_equal_rewards_give_exact_zeros_and_no_signal(kind: str):
    found = group_advantages(["a"] * 7, list(range(7)), [0.1] * 7, kind)  # the float mean of seven 0.1 is not 0.1
    assert found.values_N.tolist() == [0.0] * 7
    assert not found.has_signal_N.any()


def test_b12_seven_equal_siblings_and_one_other_stay_of_order_one():
    found = group_advantages(["a"] * 8, list(range(8)), [0.35] * 7 + [0.95], "grpo").values_N
    # mean 0.425, deviations -0.075 and 0.525, sample std 0.6 / sqrt(8)
    np.testing.assert_allclose(found, [-0.075 / (0.6 / math.sqrt(8))] * 7 + [0.525 / (0.6 / math.sqrt(8))], rtol=1e-12)


def test_b12_a_tiny_spread_on_a_large_offset_keeps_its_unit_scale():
    offset = 1e6  # and 2**-10: both exact in float64
    found = group_advantages(["a", "a"], [0, 1], [offset, offset + 2.0**-10], "grpo").values_N
    np.testing.assert_allclose(found, [-math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-9)


def test_b14_groups_are_found_by_identity_when_samples_are_missing():
    ids = ["a", "b", "c", "a", "b", "c", "b", "c"]  # interleaved; two of a, three of b and c
    rewards = [1.0, 0.0, 0.0, 0.0, 0.75, 0.75, 0.0, 0.0]
    found = group_advantages(ids, [0, 0, 0, 1, 1, 1, 2, 2], rewards, "centered").values_N
    # baselines 0.5, 0.25, 0.25
    assert found.tolist() == [0.5, -0.25, -0.25, -0.5, 0.5, 0.5, -0.25, -0.25]


def test_a_sibling_split_into_samples_counts_once():
    # siblings 0 (two samples, reward 1) and 1 (reward 0): baseline 0.5, not 2/3
    found = group_advantages(["a", "a", "a"], [0, 0, 1], [1.0, 1.0, 0.0], "centered").values_N
    assert found.tolist() == [0.5, 0.5, -0.5]


def test_a_group_of_one_has_no_signal():
    assert group_advantages(["a"], [0], [1.0], "grpo").has_signal_N.tolist() == [False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_b16_a_reward_that_is_not_finite_is_an_error(bad: float):
    with pytest.raises(DataError, match="finite"):
        group_advantages(["a", "a"], [0, 1], [1.0, bad], "grpo")


def test_two_rewards_for_one_sibling_are_an_error():
    with pytest.raises(DataError, match="share its reward"):
        group_advantages(["a", "a"], [0, 0], [1.0, 0.0], "grpo")


def test_an_unknown_kind_lists_the_valid_ones():
    with pytest.raises(ConfigError, match="centered, grpo, leave_one_out"):
        group_advantages([], [], [], "gae")
