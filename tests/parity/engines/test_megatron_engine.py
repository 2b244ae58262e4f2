"""What cells do not show of the Megatron engine: that its checks would see a leak, and how steps end that are not to happen."""

from __future__ import annotations

import math

import pytest

from asyncrl.learner.megatron.schedule import count_for_pipeline
from engines.cells import CELLS, Cell
from engines.checks import Deviates, check_change, check_scores, check_tokens
from engines.megatron_work import abandon, leak_at_start, overflow, vocabulary
from engines.suite import Suite
from engines.work import Fault

pytestmark = pytest.mark.real


def named(name: str) -> Cell:
    (cell,) = (cell for cell in CELLS if str(cell) == f"megatron {name}")
    return cell


@pytest.mark.parametrize("chunk_tokens", [64, 3], ids=["at once", "in chunks"])
def test_log_probs_of_a_divided_vocabulary_are_those_of_one_matrix_gradients_included(suite: Suite, chunk_tokens: int):
    for rank in suite.give("vocabulary", 2, vocabulary, chunk_tokens):
        assert max(rank.values()) < 1e-5, rank


@pytest.mark.parametrize("cell", ["CP2", "PP2"])
def test_attention_that_leaks_between_sequences_changes_log_probs_and_weights(suite: Suite, cell: str):
    ranks, plain = suite.ranks_run(named(cell), "sgd", fault=Fault(kind="leak")), suite.plain_run(named(cell), "sgd")
    with pytest.raises(Deviates, match="prediction for a token scored"):
        check_scores([rank.scored for rank in ranks], plain, suite.target.bounds)
    with pytest.raises(Deviates, match="prediction for a trained token"):
        check_tokens(ranks, plain, suite.target.bounds)
    with pytest.raises(Deviates, match="change of"):
        check_change(ranks, plain, suite.target.bounds)


def test_a_gradient_that_is_one_percent_too_long_changes_its_weights_too_far(suite: Suite):
    fault = Fault(kind="gradient", name="model.layers.1.mlp.down_proj.weight")
    ranks, plain = suite.ranks_run(named("one rank"), "sgd", fault=fault), suite.plain_run(named("one rank"), "sgd")
    with pytest.raises(Deviates, match=f"change of {fault.name} is off"):
        check_change(ranks, plain, suite.target.bounds)


def test_every_stage_refuses_a_model_whose_attention_leaks(suite: Suite):
    said = suite.give("a leak at the start", 2, leak_at_start, suite.order(named("PP2")))
    assert all("attention leaks" in text for text in said), said


@pytest.mark.parametrize(
    ("cell", "number", "asked", "losses"),
    [("DP2", 3, [3, 3], [2, 2]), ("PP2", 1, [1, 1], [0, 0])],
    ids=["between micro-batches", "a pipeline before its first alone"],
)
def test_an_abandoned_step_leaves_nothing_behind(suite: Suite, cell: str, number: int, asked: list[int], losses: list[int]):
    ranks = suite.give("an abandoned step", 2, abandon, (suite.order(named(cell)), number))
    assert [rank.asked for rank in ranks] == asked
    assert [rank.losses for rank in ranks] == losses
    assert all(rank.after == rank.fresh for rank in ranks), ranks


@pytest.mark.parametrize("cell", ["DP2", "PP2"])
def test_a_norm_that_is_not_finite_on_one_rank_skips_the_step_on_all(suite: Suite, cell: str):
    for norm, stepped, moved in suite.give("an overflow", 2, overflow, suite.order(named(cell))):
        assert not math.isfinite(norm)
        assert (stepped, moved) == (False, False)


@pytest.mark.parametrize(("count", "stages", "chunks", "expected"), [(1, 4, 1, 1), (1, 2, 2, 4), (4, 2, 2, 4), (5, 2, 2, 6), (5, 4, 2, 8)])
def test_an_interleaved_schedule_gets_a_multiple_of_its_stages_and_more_than_one(count: int, stages: int, chunks: int, expected: int):
    assert count_for_pipeline(count, stages, chunks) == expected
