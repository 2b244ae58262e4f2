"""The suite's checks fail where an error was planted: each check that is named here is proven to see something."""

from __future__ import annotations

import pytest

from engines.cells import CELLS, Cell
from engines.checks import Deviates, check_change, check_scores, check_steps, check_tokens
from engines.results import RankRun, Run
from engines.suite import Suite
from engines.target import Target
from engines.work import Fault

pytestmark = pytest.mark.real

BOUNDS = Target(device="cpu", dtype="float32").bounds


def planted(suite: Suite, name: str, fault: Fault) -> tuple[list[RankRun], Run]:
    cell = named(name)
    return suite.ranks_run(cell, "sgd", fault=fault), suite.plain_run(cell, "sgd")


def named(name: str) -> Cell:
    (cell,) = (cell for cell in CELLS if str(cell) == name)
    return cell


@pytest.mark.parametrize(
    "parameter",
    ["model.embed_tokens.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.down_proj.weight"],
)
def test_one_gradient_that_is_one_percent_too_long_changes_the_weights_too_far(suite: Suite, parameter: str):
    ranks, plain = planted(suite, "fsdp2 one rank", Fault(kind="gradient", name=parameter))
    check_scores([rank.scored for rank in ranks], plain, BOUNDS)
    with pytest.raises(Deviates, match=f"change of {parameter} is off"):
        check_change(ranks, plain, BOUNDS)


def test_gradients_that_are_counted_twice_double_the_norm(suite: Suite):
    ranks, plain = planted(suite, "fsdp2 DP2", Fault(kind="gradients twice"))
    with pytest.raises(Deviates, match="of a step deviates"):
        check_steps(ranks, plain, BOUNDS)
    with pytest.raises(Deviates, match="change of"):
        check_change(ranks, plain, BOUNDS)


@pytest.mark.parametrize("cell", ["one rank", "SP2", "TP2"])
def test_attention_that_leaks_changes_log_probs_and_weights(suite: Suite, cell: str):
    ranks, plain = planted(suite, f"fsdp2 {cell}", Fault(kind="leak"))
    with pytest.raises(Deviates, match="prediction for a token scored"):
        check_scores([rank.scored for rank in ranks], plain, BOUNDS)
    with pytest.raises(Deviates, match="prediction for a trained token"):
        check_tokens(ranks, plain, BOUNDS)
    with pytest.raises(Deviates, match="change of"):
        check_change(ranks, plain, BOUNDS)


def test_a_row_that_two_replicas_train_is_counted_twice(suite: Suite):
    ranks, plain = planted(suite, "fsdp2 DP2", Fault(kind="row twice"))
    with pytest.raises(Deviates, match="was trained twice in step 0: by replicas 0 and 1"):
        check_tokens(ranks, plain, BOUNDS)
    with pytest.raises(Deviates, match="loss of a step"):
        check_steps(ranks, plain, BOUNDS)
    with pytest.raises(Deviates, match="change of"):
        check_change(ranks, plain, BOUNDS)
