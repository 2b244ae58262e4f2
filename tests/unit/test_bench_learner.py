"""The learner's benchmark counts and holds what it says; one small model steps for real."""

from pathlib import Path

import pytest
import torch

from asyncrl.config.compose import compose
from asyncrl.errors import AsyncRLError
from asyncrl.launch.model_builders import build_tiny
from asyncrl.learner.packing import pack
from benchmarks import learner
from benchmarks.children import run_child
from benchmarks.learner_data import arithmetic_groups, long_tailed_groups, new_group, rows_of
from benchmarks.learner_dispatch import balanced, round_robin
from benchmarks.learner_head import chunked, dense, new_model
from benchmarks.learner_steps import measure
from tests.learner_support import one_rank

STEPS = {
    "engine_s": [2.0, 4.0, 2.5],
    "bare_s": [1.9, 3.6, 2.5],
    "unshared_s": [6.0, 8.0, 10.0],
    "trained": 100,
    "groups": 5,
    "computed": 210,
    "distinct": 200,
    "padding": 0,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    build_tiny(folder, dtype="float32", tied=True, seed=0)
    return str(folder)


def test_rates_are_medians_and_their_ratio_is_that_of_steps_beside_each_other():
    tokens, computed, padding, groups = learner.step_figures(STEPS)
    assert (tokens.value, tokens.floor, tokens.ratio, tokens.goal, tokens.holds) == (40.0, 40.0, 0.95, 0.93, True)
    assert (computed.value, computed.floor, computed.ratio, computed.holds) == (210, 200, 1.05, True)
    assert (padding.value, padding.goal, padding.holds) == (0.0, 0.0, True)
    assert (groups.value, groups.floor, groups.ratio, groups.holds) == (2.0, 0.625, 3.0, True)


def test_each_figure_can_miss_its_goal():
    slow = STEPS | {"bare_s": [1.8, 3.6, 2.0], "unshared_s": [1.0, 1.0, 1.0], "computed": 221, "padding": 1}
    missed = [
        *learner.step_figures(slow),
        *learner.dispatch_figures({"balanced_s": [3.0], "round_robin_s": [2.0]}),
        *learner.memory_figures(11 << 20, 100 << 20),
    ]
    assert {figure.name for figure in missed} == set(learner.GOALS)
    assert [figure.holds for figure in missed] == [False] * 6
    assert [figure.ratio for figure in missed if figure.ratio is not None] == pytest.approx([0.9, 1.105, 0.4, 1.5, 0.11])


def test_a_part_that_fails_says_why_and_holds_nothing(monkeypatch: pytest.MonkeyPatch):
    def child(module: str, *arguments: str, timeout_s: float) -> dict[str, float]:
        if module == "benchmarks.learner_head":
            return {"peak_bytes": {"chunked": 1 << 20, "dense": 20 << 20}[arguments[0]]}
        raise AsyncRLError(f"{module} was not done after {timeout_s:g} s")

    monkeypatch.setattr(learner, "run_child", child)
    monkeypatch.setattr(learner, "prepare_model", lambda config, cache: Path("model"))
    figures = learner.run(1)
    assert [figure.name for figure in figures] == list(learner.GOALS)
    assert [(figure.value, figure.holds) for figure in figures[:5]] == [(None, None)] * 5
    assert "benchmarks.learner_steps was not done after" in figures[0].note and figures[5].ratio == 0.05


def test_a_child_that_fails_is_told_with_the_end_of_what_it_wrote():
    with pytest.raises(AsyncRLError, match=r"asyncrl ended with exit code 2: asyncrl: there is no group 'kueue'"):
        run_child("asyncrl", "config", "kueue", timeout_s=60.0)


def test_both_deals_give_every_group_once_and_the_balanced_one_has_the_lighter_slower_rank():
    groups = [new_group(ticket, [1, 2], [[3] * length]) for ticket, length in enumerate((60, 3, 50, 3, 2, 3))]
    tickets = [[[group.ticket for group in part] for part in deal(groups, 2)] for deal in (round_robin, balanced)]
    assert tickets[0] == [[0, 2, 4], [1, 3, 5]]  # 118 tokens with their prompts, 15
    assert sorted(map(sorted, tickets[1])) == [[0, 4], [1, 2, 3, 5]]  # 66, 67


def test_the_long_tail_is_long_and_the_same_every_time():
    groups = long_tailed_groups(24, 4, vocabulary=64, longest=960)
    longest = sorted(max(len(t) for t in group.trajectories) for group in groups)
    assert longest[12] < 70 and longest[-1] == 16 + 960
    assert [g.meta().lengths_N for g in groups] == [g.meta().lengths_N for g in long_tailed_groups(24, 4, vocabulary=64, longest=960)]


def test_tokens_are_counted_as_the_model_meets_them(tiny: str):
    one_rank()
    group = new_group(0, [1, 2, 3], [[4, 5], [6]])
    config = compose(["recipe=arithmetic", "learner.micro_batch_tokens=8"])
    steps = measure(config, tiny, [group], 1)
    assert (steps.trained, steps.groups, steps.computed, steps.distinct, steps.padding) == (3, 1, 6, 6, 0)
    assert len(steps.engine_s) == len(steps.bare_s) == len(steps.unshared_s) == 1
    split = measure(compose(["recipe=arithmetic", "learner.micro_batch_tokens=5"]), tiny, [group], 0)
    assert (split.computed, split.distinct) == (9, 6)  # each sibling computes the prompt again


def test_responses_of_the_arithmetic_recipe_are_numbers_that_end_their_line(tiny: str):
    config = compose(["recipe=arithmetic"])
    for group in arithmetic_groups(config, tiny, 3):
        responses = [t.input_ids[t.prompt_length :].tolist() for t in group.trajectories]
        assert len(responses) == 8 and len({t.prompt_length for t in group.trajectories}) == 1
        assert len({tuple(response) for response in responses[1::2]}) == 1  # the answer
        assert all(2 <= len(response) <= 6 for response in responses)


def test_both_forms_of_the_head_give_the_same_log_probs():
    model = new_model(32)
    (micro,) = pack(rows_of([new_group(0, [1, 2], [[3, 4, 5], [6, 7]])]), cap_tokens=16, shared_prompt=True)
    torch.testing.assert_close(chunked(model, micro), dense(model, micro))
