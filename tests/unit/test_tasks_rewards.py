"""Rewards: registered ones on hand-worked responses, functions of the user, and what is never trained on."""

from __future__ import annotations

import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config import Config, GeneratorConfig, TaskConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.tasks import check_reward, check_task, new_reward
from asyncrl.tasks.numerals import last_number, whole_number
from asyncrl.tasks.prompt import Prompt
from asyncrl.tasks.rewards import answer_fault


def reward_of(name: str, answer: str, response: str) -> float:
    value, parts = new_reward(Config(task=TaskConfig(reward=name))).score(Prompt(prompt_id="p", prompt="?", answer=answer), response)
    assert parts == {}
    return value


@pytest.mark.parametrize(
    ("response", "expected"),
    [("3141", 1.0), ("3142", 0.75), ("3", 0.25), ("", 0.0), ("1413", 0.0), ("31413", 0.8), ("3141" * 2, 0.5), (" 3141", 0.0)],
)
def test_share_of_positions_counts_missing_and_extra_characters_as_wrong(response: str, expected: float) -> None:
    assert reward_of("positions", "3141", response) == expected


@pytest.mark.parametrize(("response", "expected"), [("68", 1.0), (" 68\n", 1.0), ("68.0", 0.0), ("068", 0.0), ("", 0.0)])
def test_exact_text_forgives_outer_space_only(response: str, expected: float) -> None:
    assert reward_of("exact_text", "68", response) == expected


@pytest.mark.parametrize(
    ("response", "expected"), [("4000", 1.0), (" 4,000 ", 1.0), ("4000.0", 1.0), ("$4,000", 1.0), ("about 4000", 0.0), ("-4000", 0.0)]
)
def test_exact_number_compares_values_of_the_whole_response(response: str, expected: float) -> None:
    assert reward_of("exact_number", " 4,000 ", response) == expected


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("42", "6 * 7 is 42.", 1.0),
        ("42", "#### 42", 1.0),
        ("42", "#### 42 and not 43", 1.0),
        ("42", "42, no: 43", 0.0),
        ("42", "42\n#### nothing", 0.0),
        ("-3", "the answer is -3", 1.0),
        ("-3", "5-3", 0.0),
        ("1234.5", "she pays $1,234.50", 1.0),
        ("1234", "1,234,567", 0.0),
        ("0.5", "= .5", 1.0),
        ("42", "", 0.0),
    ],
)
def test_final_number_reads_gsm8k_style_responses(answer: str, response: str, expected: float) -> None:
    assert reward_of("final_number", answer, response) == expected


@pytest.mark.parametrize(
    ("text", "value"), [("1,234", "1234"), ("-7", "-7"), ("−7", "-7"), ("+7", "7"), ("1,23", None), ("٣", None), ("1e5", None), ("", None)]
)
def test_whole_numbers_have_proper_thousands_and_plain_digits(text: str, value: str | None) -> None:
    assert whole_number(text) == (None if value is None else Decimal(value))


def test_a_number_of_a_million_digits_is_no_answer() -> None:
    assert last_number("1" * 1_000_000) is None


@pytest.mark.parametrize(
    "value", [None, "1", True, False, np.bool_(True), float("nan"), float("inf"), -np.inf, np.float32("nan"), [1.0], 1j]
)
def test_b16_a_reward_that_is_no_finite_number_is_refused_and_never_coerced(value: object) -> None:
    with pytest.raises(DataError, match="a reward is"):
        check_reward(value)


@pytest.mark.parametrize("value", [1e9, -1e9, 1_000_001, 10**400])
def test_b16_a_reward_beyond_a_million_is_refused(value: float) -> None:
    with pytest.raises(DataError, match=r"at most 1e\+06"):
        check_reward(value)


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1.0), (0.25, 0.25), (np.float32(0.5), 0.5), (np.int64(-2), -2.0), (Fraction(1, 4), 0.25), (1e6, 1e6)]
)
def test_b16_numbers_of_every_kind_are_accepted(value: object, expected: float) -> None:
    result = check_reward(value)
    assert result == expected and type(result) is float


def test_an_unknown_reward_lists_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match="exact_number, exact_text, final_number, positions, reasoning_gym; met 'exactt'"):
        new_reward(Config(task=TaskConfig(reward="exactt")))


def test_each_task_has_a_reward_of_its_own() -> None:
    names = [new_reward(Config(task=TaskConfig(name=name))).name for name in ("sums", "copy", "jsonl", "parquet")]
    assert names == ["exact_text", "positions", "final_number", "final_number"]


def test_the_reward_of_reasoning_gym_is_refused_for_other_tasks() -> None:
    with pytest.raises(ConfigError, match=r"met task\.name=copy"):
        new_reward(Config(task=TaskConfig(reward="reasoning_gym")))


@pytest.mark.parametrize(
    ("reward", "answer", "fault"),
    [
        ("final_number", "4,000", ""),
        ("final_number", "four", "'four' is not a number"),
        ("exact_text", "four", ""),
        ("exact_text", "  ", "the answer is empty"),
        ("mine:score", "", ""),
    ],
)
def test_an_answer_that_the_reward_cannot_use_is_found_before_the_run(reward: str, answer: str, fault: str) -> None:
    assert fault in answer_fault(reward, answer) and bool(fault) == bool(answer_fault(reward, answer))


MODULE = """
import math
def length(prompt, response): return len(response) / 10
def parts(prompt, response): return 0.5, {"format": 1.0, "value": 0}
def bad_part(prompt, response): return 0.5, {"format": None}
def nan(prompt, response): return math.nan
def raises(prompt, response): raise KeyError(prompt.answer)
def one_argument(response): return 0.0
async def coroutine(prompt, response): return 0.0
value = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "my_broken_rewards.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return "my_rewards"


def score(path: str) -> tuple[float, dict[str, float]]:
    return new_reward(Config(task=TaskConfig(reward=path))).score(Prompt(prompt_id="p", prompt="?", answer="a"), "four")


def test_a_function_of_the_user_scores_and_may_name_parts(module: str) -> None:
    assert score(f"{module}:length") == (0.4, {})
    assert score(f"{module}:parts") == (0.5, {"format": 1.0, "value": 0.0})


@pytest.mark.parametrize("function", ["nan", "bad_part"])
def test_b16_what_a_function_of_the_user_returns_is_checked(module: str, function: str) -> None:
    with pytest.raises(DataError, match="a reward is"):
        score(f"{module}:{function}")


def test_b16_what_a_function_of_the_user_raises_comes_through(module: str) -> None:
    with pytest.raises(KeyError, match="a"):
        score(f"{module}:raises")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_rewards:lenght", "no function 'lenght'; it has bad_part, coroutine, length, nan, one_argument, parts, raises"),
        ("my_rewards:value", "no function 'value'"),
        ("my_rewards:", "no function ''"),
        ("my_rewards:coroutine", "make it a plain one"),
        ("my_rewards:one_argument", "does not accept"),
        ("my_broken_rewards:length", "No module named 'not_installed_anywhere'"),
        ("my_absent_rewards:length", "No module named 'my_absent_rewards'"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_with_the_reason(module: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_reward(Config(task=TaskConfig(reward=path)))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"reward": "exactt"}, "met 'exactt'"),
        ({"eval_size": 9000}, "met 9000"),
        ({"size": 10_001}, "met 10001"),
        ({"template": "no place"}, "holds"),
        ({"name": "jsonl", "path": "nowhere"}, "nowhere"),
        ({"reward": "my_absent_rewards:length"}, "does not import"),
    ],
)
def test_a_task_that_cannot_run_is_refused_before_a_process_starts(task: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_task(Config(task=TaskConfig(**task)))


def test_a_reward_that_only_the_generators_interpreter_has_is_left_to_it() -> None:
    check_task(Config(task=TaskConfig(reward="my_absent_rewards:length"), generator=GeneratorConfig(python="/usr/bin/python3")))
