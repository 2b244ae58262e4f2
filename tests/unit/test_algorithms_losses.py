from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from learner_support import settings

from asyncrl.algorithms.divergence import effective_sample_size, importance_weights, k3
from asyncrl.algorithms.losses import STATISTICS, Denominators, LossTokens, policy_loss


def tokens(logprobs: list[float], advantages: list[float], **fields: Any) -> LossTokens:
    count = len(logprobs)
    behavior = torch.tensor(fields.get("behavior", [-1.0] * count))
    return LossTokens(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        entropy=torch.tensor(fields.get("entropy", [0.0] * count), requires_grad=True),
        proximal_logprobs=torch.tensor(fields["proximal"]) if "proximal" in fields else behavior,
        behavior_logprobs=behavior,
        advantages=torch.tensor(advantages),
        mask=torch.tensor(fields.get("mask", [1.0] * count)),
        rows=torch.tensor(fields.get("rows", [0] * count)),
        num_rows=max(fields.get("rows", [0])) + 1,
    )


def over(num_tokens: int, num_trajectories: int = 1) -> Denominators:
    return Denominators(tokens=num_tokens, trajectories=num_trajectories)


def statistic(sums: torch.Tensor, name: str) -> float:
    return float(sums[STATISTICS.index(name)])


def test_b28_the_ratio_is_taken_to_the_behaviour_policy_in_the_first_epoch():
    one = tokens([-2.0], [1.0])
    output = policy_loss(one, settings(), over(1))
    assert output.loss.item() == pytest.approx(-0.3679, abs=1e-4)  # e^-1
    assert statistic(output.sums, "abs_log_ratio") == 1.0


def test_clipping_acts_on_the_side_that_would_gain():
    # ratio e^0.5 = 1.6487: positive advantage clipped to 1.2, negative one not
    output = policy_loss(tokens([-0.5, -0.5], [1.0, -1.0]), settings(), over(2))
    assert output.loss.item() == pytest.approx((-1.2 + math.exp(0.5)) / 2, rel=1e-6)
    assert statistic(output.sums, "clipped") == 1.0
    # ratio e^-0.5 = 0.6065: negative advantage clipped to 0.8, positive one not
    output = policy_loss(tokens([-1.5, -1.5], [1.0, -1.0]), settings(clip_low=0.2, clip_high=0.3), over(2))
    assert output.loss.item() == pytest.approx((-math.exp(-0.5) + 0.8) / 2, rel=1e-6)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_ratio_times_advantage():
    pair = tokens([-0.5, -1.5], [1.0, 2.0])
    policy_loss(pair, settings(), over(2)).loss.backward()
    assert pair.logprobs.grad is not None
    assert pair.logprobs.grad.tolist() == pytest.approx([0.0, -2.0 * math.exp(-0.5) / 2])


def test_the_two_clips_are_their_own():
    output = policy_loss(tokens([0.0], [1.0]), settings(clip_high=0.28), over(1))  # ratio e
    assert output.loss.item() == pytest.approx(-1.28)


def test_b24_micro_batches_of_one_and_nine_tokens_give_the_mean_over_ten():
    small = tokens([-1.0], [1.0])
    large = tokens([-1.0] * 9, [-1.0] * 9)
    loss = policy_loss(small, settings(), over(10)).loss + policy_loss(large, settings(), over(10)).loss
    assert loss.item() == pytest.approx(0.8)  # the mean of the two means would be 0.0


def test_b25_the_gradient_of_four_trajectories_does_not_depend_on_the_accumulation():
    whole = tokens([-1.0] * 4, [1.0] * 4, rows=[0, 1, 2, 3])
    policy_loss(whole, settings(), over(4, 4)).loss.backward()
    halves = [tokens([-1.0] * 2, [1.0] * 2, rows=[0, 1]) for _ in range(2)]
    for half in halves:
        policy_loss(half, settings(), over(4, 4)).loss.backward()
    assert whole.logprobs.grad is not None
    assert whole.logprobs.grad.tolist() == [-0.25] * 4
    assert [g for half in halves for g in half.logprobs.grad.tolist()] == [-0.25] * 4


def test_b26_tokens_that_the_correction_masks_leave_numerator_and_denominator():
    # 25 of 30 tokens have proximal/behaviour = e > 2 and are taken out; five remain, each with loss -1
    many = tokens([-1.0] * 30, [1.0] * 30, behavior=[-2.0] * 25 + [-1.0] * 5, proximal=[-1.0] * 30)
    output = policy_loss(many, settings(correction="mask"), over(30))
    kept = statistic(output.sums, "kept_tokens")
    assert kept == 5.0
    assert output.loss.item() * 30 / kept == pytest.approx(-1.0)  # with one mask for the loss only it would be -0.17


def test_b26_an_all_masked_micro_batch_has_zero_loss_and_a_finite_zero_gradient():
    nothing = tokens([-1.0, float("-inf")], [1.0, 1.0], mask=[0.0, 0.0])
    for aggregation in ("token_mean", "sequence_mean"):
        output = policy_loss(nothing, settings(aggregation=aggregation, entropy_bonus=0.1), over(0, 0))
        output.loss.backward()
        assert output.loss.item() == 0.0
        assert nothing.logprobs.grad is not None
        assert nothing.logprobs.grad[0].item() == 0.0


def test_truncation_caps_the_correction_weight_and_leaves_the_denominator():
    # weights e^1 capped to 2, and e^-1
    pair = tokens([-1.0, -1.0], [1.0, 1.0], behavior=[-2.0, 0.0], proximal=[-1.0, -1.0])
    output = policy_loss(pair, settings(correction="truncate"), over(2))
    assert output.loss.item() == pytest.approx(-(2.0 + math.exp(-1.0)) / 2)
    assert statistic(output.sums, "kept_tokens") == 2.0
    assert statistic(output.sums, "beyond_cap") == 1.0


def test_the_correction_statistics_are_there_when_it_is_off():
    pair = tokens([-1.0, -1.0], [1.0, 1.0], behavior=[-2.0, 0.0], proximal=[-1.0, -1.0])
    output = policy_loss(pair, settings(), over(2))
    assert output.loss.item() == pytest.approx(-1.0)
    assert statistic(output.sums, "correction") == pytest.approx(math.e + math.exp(-1.0))


def test_the_sequence_mean_weighs_trajectories_alike():
    # lengths 1 and 3: token mean (-1 + 3) / 4, sequence mean (-1 + 1) / 2
    ragged = tokens([-1.0] * 4, [1.0, -1.0, -1.0, -1.0], rows=[0, 1, 1, 1])
    assert policy_loss(ragged, settings(), over(4, 2)).loss.item() == pytest.approx(0.5)
    assert policy_loss(ragged, settings(aggregation="sequence_mean"), over(4, 2)).loss.item() == pytest.approx(0.0, abs=1e-7)


def test_the_entropy_bonus_pulls_entropy_up():
    pair = tokens([-1.0, -1.0], [0.0, 0.0], entropy=[0.5, 1.5])
    output = policy_loss(pair, settings(entropy_bonus=0.1), over(2))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-0.1)
    assert pair.entropy.grad is not None
    assert pair.entropy.grad.tolist() == pytest.approx([-0.05, -0.05])


def test_k3_is_zero_at_equality_and_hand_worked_elsewhere():
    found = k3(torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.0, -1.0, -2.0]))
    assert found.tolist() == pytest.approx([0.0, math.exp(-1), math.e - 2])


def test_b27_k3_estimates_the_divergence_of_the_sampling_policy_from_the_learning_one():
    sampled, learning = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.5, 0.5]).log()
    mean = (sampled.exp().double() * k3(learning, sampled)).sum().item()
    assert mean == pytest.approx(0.7 * math.log(0.7 / 0.5) + 0.3 * math.log(0.3 / 0.5), rel=1e-6)


def test_the_effective_sample_size_is_one_for_equal_weights():
    assert effective_sample_size(6.0, 12.0, 3) == 1.0
    assert effective_sample_size(4.0, 10.0, 2) == 0.8
    assert effective_sample_size(0.0, 0.0, 0) == 1.0


def test_importance_weights_stay_finite():
    assert importance_weights(torch.tensor([0.0]), torch.tensor([-1e4])).item() == pytest.approx(math.exp(20))
