from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from learner_support import rows_of, trajectory
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from asyncrl.learner.packing import filler, pack
from asyncrl.learner.router import balance_loss
from asyncrl.trajectory import TrajectoryGroup

GROUP = TrajectoryGroup(trajectories=(trajectory([1, 2, 3], [4, 5], sibling=0), trajectory([1, 2, 3], [6, 7, 8, 9], sibling=1)))


def test_two_equal_experts_of_which_one_gets_every_token_cost_one_a_row():
    (micro,) = pack(rows_of([GROUP]), cap_tokens=64, shared_prompt=True)
    assert balance_loss([torch.zeros(len(micro), 2)], 1, micro, None).item() == pytest.approx(2.0)


def test_an_even_choice_costs_less_than_a_lopsided_one():
    (micro,) = pack(rows_of([GROUP])[:1], cap_tokens=64, shared_prompt=True)
    # five tokens, logits ±ln 3: probabilities 3/4 and 1/4; four of five go to the first expert
    logits = torch.tensor([[1.0, -1.0]] * 4 + [[-1.0, 1.0]]) * torch.log(torch.tensor(3.0)) / 2
    mean = (4 * 0.75 + 0.25) / 5
    assert balance_loss([logits], 1, micro, None).item() == pytest.approx(2 * (0.8 * mean + 0.2 * (1 - mean)))


@pytest.mark.parametrize("shared", [True, False])
def test_a_pack_costs_what_transformers_says_of_each_trajectory_alone(shared: bool):
    rows = rows_of([GROUP])
    (micro,) = pack(rows, cap_tokens=64, shared_prompt=shared)
    torch.manual_seed(0)
    table = torch.randn(2, 64, 4)  # what a router of two layers would say of a token, were it to look at nothing else
    layers = [table[layer][micro.input_ids[0]] for layer in range(2)]
    alone = [tuple(table[layer][torch.from_numpy(row.trajectory.input_ids.astype("int64"))] for layer in range(2)) for row in rows]
    expected = sum(load_balancing_loss_func(logits, 4, 2) for logits in alone)
    assert balance_loss(layers, 2, micro, None).item() == pytest.approx(float(expected), rel=1e-6)


def test_a_filler_costs_nothing_and_keeps_its_gradient():
    logits = torch.randn(2, 4, requires_grad=True)
    loss = balance_loss([logits], 2, filler(), None)
    loss.backward()
    assert loss.item() == 0.0 and logits.grad is not None and not logits.grad.any()


def test_a_row_counts_its_prompt_and_not_its_sibling():
    (micro,) = pack(rows_of([GROUP]), cap_tokens=64, shared_prompt=True)
    only_first = replace(micro, row_segments=micro.row_segments[:1], row_parents=micro.row_parents[:1])
    logits = torch.zeros(len(micro), 2)
    before = balance_loss([logits], 1, only_first, None).item()
    logits[micro.segments == micro.row_segments[1]] = torch.tensor([-9.0, 9.0])
    assert balance_loss([logits], 1, only_first, None).item() == before
    logits[micro.segments == micro.row_parents[0]] = torch.tensor([-9.0, 9.0])
    assert balance_loss([logits], 1, only_first, None).item() != before
