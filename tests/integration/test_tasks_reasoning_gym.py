"""reasoning-gym as a source: index-addressable, disjoint from its held-out set, scored by its own rule."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config, TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import new_eval_set, new_reward, new_source

TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
FORM = "Question: {question}\nAnswer: {expression} = "


def gym(**options: Any) -> Config:
    return Config(task=TaskConfig(**{"name": "reasoning_gym", "dataset": "chain_sum", "dataset_args": TWO_DIGITS, **options}))


def test_a_prompt_is_a_pure_function_of_seed_and_index() -> None:
    first, again = new_source(gym(seed=4)), new_source(gym(seed=4))
    assert [first.prompt(i) for i in range(5)] == [again.prompt(i) for i in reversed(range(5))][::-1]
    assert [first.prompt(i).prompt for i in range(5)] != [new_source(gym(seed=5)).prompt(i).prompt for i in range(5)]


def test_the_template_shows_question_and_bare_expression() -> None:
    prompt = new_source(gym(template=FORM)).prompt(0)
    question, _, rest = prompt.prompt.partition("\nAnswer: ")
    expression = rest.removesuffix(" = ")
    assert question == f"Question: State the final answer to the following arithmetic problem: {expression} ="
    left, operator, right = expression.split(" ")
    assert prompt.answer == str(int(left) + int(right) if operator == "+" else int(left) - int(right))


def test_training_never_meets_a_held_out_question_although_questions_repeat() -> None:
    config = gym(dataset_args={**TWO_DIGITS, "min_digits": 1, "max_digits": 1}, eval_size=10, size=2000, epochs=1)
    held = {prompt.prompt for prompt in new_eval_set(config)}
    source = new_source(config)
    trained = [source.prompt(index).prompt for index in range(2000)]
    assert len(held) == 10
    assert not held & set(trained)
    assert len(set(trained)) < 200, "one-digit sums and differences: the same questions come again and again"


def test_asking_for_more_held_out_questions_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="met 100, chain_sum gave"):
        new_eval_set(gym(dataset_args={**TWO_DIGITS, "min_digits": 1, "max_digits": 1}, eval_size=100))


def test_the_datasets_own_rule_scores_with_partial_credit() -> None:
    config = gym()
    reward, prompt = new_reward(config), new_source(config).prompt(0)
    padded = f"x{prompt.answer}"
    assert reward.score(prompt, f" {prompt.answer}\n") == (1.0, {})
    assert reward.score(prompt, padded) == (len(prompt.answer) / len(padded), {})
    assert reward.score(prompt, "")[0] == 0.0


def test_permuted_answers_are_scored_as_the_other_entry() -> None:
    config = gym(permute_answers=True, size=50)
    reward, source = new_reward(config), new_source(config)
    assert all(reward.score(source.prompt(i), source.prompt(i).answer) == (1.0, {}) for i in range(50))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "met 'chain_sums'; there are chain_sum"),
        ({"dataset_args": {"min_term": 2}}, "do not fit chain_sum"),
        ({"dataset_args": {"min_terms": 5, "max_terms": 2}}, "do not fit chain_sum"),
        ({"dataset_args": {"seed": 3}}, "neither seed nor size; met seed"),
    ],
)
def test_options_that_the_dataset_does_not_know_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_source(gym(**options))
