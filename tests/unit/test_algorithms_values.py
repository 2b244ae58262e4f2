from __future__ import annotations

import pytest
import torch

from asyncrl.algorithms.losses import Denominators
from asyncrl.algorithms.values import VALUE_STATISTICS, value_loss


def test_the_loss_is_half_the_squared_error_over_all_tokens():
    values, returns = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])
    output = value_loss(values, returns, torch.ones(2), Denominators(tokens=5, trajectories=1))
    assert output.loss.item() == pytest.approx(0.5 * (1 + 4) / 5)
    assert dict(zip(VALUE_STATISTICS, output.sums.tolist(), strict=True)) == {
        "tokens": 2.0,
        "loss": pytest.approx(0.5),
        "error_square": 5.0,
        "returns": 1.0,
        "returns_square": 1.0,
    }


def test_the_gradient_of_a_value_is_its_error_over_all_tokens():
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    value_loss(values, torch.tensor([0.0, 1.0]), torch.ones(2), Denominators(tokens=4, trajectories=1)).loss.backward()
    assert values.grad is not None and values.grad.tolist() == [0.25, 0.5]


def test_what_is_masked_may_be_anything():
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    output = value_loss(values, torch.tensor([0.0, float("inf")]), torch.tensor([1.0, 0.0]), Denominators(tokens=1, trajectories=1))
    output.loss.backward()
    assert output.loss.item() == 0.5 and values.grad is not None and values.grad.tolist() == [1.0, 0.0]
    assert torch.isfinite(output.sums).all()
