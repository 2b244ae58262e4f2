"""Sums and copied digits: the right problems, and a held-out side that training never sees."""

from __future__ import annotations

import re

import pytest

from asyncrl.config import Config, TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import new_eval_set, new_reward, new_source
from asyncrl.tasks.generated import copy_digits, is_held_out, sums
from asyncrl.tasks.prompt import Prompt


def terms(prompt: Prompt) -> tuple[int, int]:
    a, b = re.fullmatch(r"sums/(\d+)\+(\d+)", prompt.prompt_id).groups()
    return int(a), int(b)


def test_a_sum_is_asked_in_the_form_that_a_small_model_can_answer() -> None:
    by_id = {prompt.prompt_id: prompt for prompt in sums(TaskConfig(name="sums")).training}
    (name, prompt) = next(iter(by_id.items()))
    a, b = terms(prompt)
    assert prompt.prompt == f"Question: What is {a} + {b}?\nAnswer: {a} + {b} = " and prompt.answer == str(a + b)
    assert name == prompt.prompt_id and not prompt.is_chat


def test_the_template_option_replaces_the_form_of_a_sum() -> None:
    prompt = sums(TaskConfig(name="sums", template="{expression}=")).training[0]
    a, b = terms(prompt)
    assert prompt.prompt == f"{a} + {b}="


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_training_and_held_out_sums_are_disjoint_also_with_the_terms_swapped(seed: int) -> None:
    both = sums(TaskConfig(name="sums", seed=seed))
    training = {frozenset(terms(prompt)) for prompt in both.training}
    evaluation = {frozenset(terms(prompt)) for prompt in both.evaluation}
    assert not training & evaluation
    assert len(both.training) + len(both.evaluation) == 90 * 90
    assert {terms(p) for p in both.training + both.evaluation} == {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert 850 < len(both.evaluation) < 1200, "about an eighth of 8100"


def test_a_run_never_trains_a_held_out_sum_in_two_whole_epochs() -> None:
    config = Config(task=TaskConfig(name="sums", seed=3, epochs=2, eval_size=400))
    held = {prompt.prompt for prompt in new_eval_set(config)}
    source = new_source(config)
    assert len(held) == 400
    assert not held & {source.prompt(index).prompt for index in range(source.size)}


def test_a_larger_held_out_set_holds_the_smaller_one() -> None:
    small = new_eval_set(Config(task=TaskConfig(name="sums", eval_size=10)))
    assert new_eval_set(Config(task=TaskConfig(name="sums", eval_size=20)))[:10] == small


def test_more_held_out_prompts_than_there_are_is_refused_with_both_numbers() -> None:
    available = len(sums(TaskConfig(name="sums")).evaluation)
    with pytest.raises(ConfigError, match=f"met 9000, there are {available}"):
        new_eval_set(Config(task=TaskConfig(name="sums", eval_size=9000)))


def test_permuted_answers_leave_the_held_out_set_true() -> None:
    config = Config(task=TaskConfig(name="sums", permute_answers=True, eval_size=50))
    assert all(str(sum(terms(prompt))) == prompt.answer for prompt in new_eval_set(config))
    source = new_source(config)
    wrong = sum(str(sum(terms(source.prompt(i)))) != source.prompt(i).answer for i in range(200))
    assert wrong > 180, "two sums are equal by chance about once in eighty"


def test_copied_digits_are_split_without_overlap() -> None:
    both = copy_digits(TaskConfig())
    training, evaluation = {p.answer for p in both.training}, {p.answer for p in both.evaluation}
    assert not training & evaluation and len(training | evaluation) == 10_000
    assert {p.prompt for p in both.training} == {f"{digits}>" for digits in training}
    assert all(is_held_out(digits, 0) for digits in evaluation)


def test_the_best_copy_that_ignores_the_prompt_gets_at_most_half() -> None:
    """Exact: the reward of a fixed answer is a mean over positions, so the best one takes each position's commonest digit."""
    answers = [prompt.answer for prompt in copy_digits(TaskConfig()).training]
    best = "".join(max("0123456789", key=lambda d: sum(a[place] == d for a in answers)) for place in range(4))
    reward = new_reward(Config())
    expected = sum(reward.score(Prompt(prompt_id="", prompt="", answer=a), best)[0] for a in answers) / len(answers)
    assert 0.1 <= expected < 0.11
    assert expected <= 0.5


def test_permuted_copy_leaves_nothing_to_copy() -> None:
    """Copying the prompt under permuted answers is worth what a guess is worth: about one position in ten."""
    config = Config(task=TaskConfig(permute_answers=True, epochs=1))
    source, reward = new_source(config), new_reward(config)
    prompts = [source.prompt(index) for index in range(source.size)]
    mean = sum(reward.score(prompt, prompt.prompt.removesuffix(">"))[0] for prompt in prompts) / len(prompts)
    assert 0.08 < mean < 0.12
