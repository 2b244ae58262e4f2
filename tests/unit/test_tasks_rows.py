"""Rows in the shapes that people bring, each read as its format means it or refused with the field at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.config import TaskConfig
from asyncrl.errors import DataError
from asyncrl.tasks.prompt import Prompt
from asyncrl.tasks.rows import prompt_from_row

USER = {"role": "user", "content": "What is 6 * 7?"}


def read(row: dict[str, Any], *, reward: str = "final_number", **task: Any) -> Prompt:
    return prompt_from_row(row, 5, TaskConfig(name="jsonl", **task), reward)


def refusal(row: dict[str, Any], **options: Any) -> tuple[str, str]:
    with pytest.raises(DataError) as caught:
        read(row, **options)
    return caught.value.message, caught.value.field


def test_d1_verl_gsm8k_reads_messages_and_the_ground_truth_of_the_reward_model() -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": 'Six times seven? Let\'s think step by step and output the final answer after "####".'}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "-1234.5"},
        "extra_info": {"split": "train", "index": 0, "answer": "… #### -1,234.5", "question": "Six times seven?"},
    }
    prompt = read(row)
    assert (prompt.prompt_id, prompt.is_chat, prompt.answer) == ("row-5", True, "-1234.5")
    assert json.loads(prompt.prompt) == row["prompt"], "the marker inside the question is left alone"
    assert json.loads(prompt.extra) == {key: row[key] for key in ("data_source", "ability", "extra_info")}


def test_d3_dapo_reads_an_integer_answer_given_as_text() -> None:
    row = {"data_source": "math_dapo", "prompt": [USER], "ability": "MATH", "reward_model": {"style": "rule", "ground_truth": "34"}}
    assert read(row).answer == "34"


def test_d4_processed_dapo_reads_source_prompt_and_top_level_ground_truth() -> None:
    prompt = read({"source_prompt": [USER], "ground_truth": "42"})
    assert json.loads(prompt.prompt) == [USER] and prompt.answer == "42"


def test_d5_a_label_reads_the_same_as_number_and_as_text() -> None:
    assert read({"prompt": "q", "label": 4}).answer == read({"prompt": "q", "label": "4"}).answer == "4"
    assert read({"prompt": "q", "label": 4.5}).answer == "4.5"
    assert read({"prompt": "q", "label": " 4,000 "}).answer == "4,000"


def test_d5_key_names_are_options_and_win_over_the_usual_names() -> None:
    row = {"prompt": "not this", "problem": "this", "label": "1", "final_answer": "2"}
    prompt = read(row, prompt_key="problem", label_key="final_answer")
    assert (prompt.prompt, prompt.answer) == ("this", "2")
    assert json.loads(prompt.extra) == {"prompt": "not this", "label": "1"}


def test_d6_raw_gsm8k_takes_the_number_after_the_marker() -> None:
    prompt = read({"question": "How many?", "answer": "5 + 7 = <<5+7=12>>12 eggs.\n#### 1,012"})
    assert (prompt.prompt, prompt.answer, prompt.is_chat) == ("How many?", "1,012", False)


def test_d6_an_answer_without_the_marker_is_the_answer() -> None:
    assert read({"question": "How many?", "answer": "12"}).answer == "12"


def test_d6_messages_with_an_answer() -> None:
    assert json.loads(read({"messages": [USER], "answer": "42"}).prompt) == [USER]


def test_d7_skyrl_reads_the_ground_truth_of_the_reward_spec() -> None:
    assert read({"prompt": [USER], "env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "7"}}).answer == "7"


def test_d8_other_columns_go_to_a_function_of_the_user_that_needs_no_answer() -> None:
    prompt = read({"prompt": "Write a poem", "topic": "rain", "lines": 4}, reward="mine:score")
    assert prompt.answer == "" and json.loads(prompt.extra) == {"topic": "rain", "lines": 4}


def test_d9_a_prompt_wins_over_a_question() -> None:
    assert read({"prompt": "this", "question": "not this", "answer": "1"}).prompt == "this"


def test_d12_developer_is_system_and_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    prompt = read({"prompt": [{"role": "developer", "content": "Brief."}, {"role": "user", "content": parts}], "label": 4})
    assert json.loads(prompt.prompt) == [{"role": "system", "content": "Brief."}, {"role": "user", "content": "2 + 2?"}]


def test_members_that_arrow_added_as_nulls_do_not_reach_the_reward() -> None:
    prompt = read({"prompt": "q", "label": "1", "extra_info": {"index": None, "tools_kwargs": None, "split": "train"}, "ability": None})
    assert json.loads(prompt.extra) == {"extra_info": {"split": "train"}}


def test_the_system_option_fills_a_gap_and_replaces_nothing() -> None:
    own = [{"role": "system", "content": "Mine."}, USER]
    assert json.loads(read({"prompt": [USER], "label": 1}, system="Yours.").prompt)[0] == {"role": "system", "content": "Yours."}
    assert json.loads(read({"prompt": own, "label": 1}, system="Yours.").prompt) == own


def test_a_template_goes_around_text_and_around_the_only_message() -> None:
    form = "Question: {question}\nAnswer: {expression} = "
    expected = "Question: What is 6 * 7?\nAnswer: 6 * 7 = "
    assert read({"prompt": "What is 6 * 7?", "label": 42}, template=form).prompt == expected
    chat = read({"prompt": [USER], "label": 42}, template=form)
    assert (chat.prompt, chat.is_chat) == (expected, False)


def test_a_question_with_braces_is_not_filled_in_again() -> None:
    assert read({"prompt": "{expression} {x}", "label": 1}, template="<{question}>").prompt == "<{expression} {x}>"


def test_a_template_never_drops_messages_silently() -> None:
    message, field = refusal({"prompt": [{"role": "system", "content": "s"}, USER], "label": 1}, template="{question}")
    assert "one message; this one has 2" in message and field == "prompt"


@pytest.mark.parametrize(
    ("row", "reason", "field"),
    [
        ({"prompt": [USER], "images": [{"path": "a.png"}]}, "images, video and audio are not supported", "images"),
        ({"prompt": [USER], "tools": [{"type": "function"}]}, "tools are not supported", "tools"),
        ({"prompt": [USER], "extra_info": {"need_tools_kwargs": True}}, "tools and interactions are not supported", "extra_info"),
        ({"prompt": [USER], "extra_info": {"tools_kwargs": {"f": {"create_kwargs": {}}}}}, "tools and interactions", "extra_info"),
        ({"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}, USER]}, "tool calls", "prompt[1]"),
        ({"prompt": [USER, {"role": "tool", "content": "x"}, USER]}, "tool calls", "prompt[1]"),
        ({"prompt": [USER, {"role": "system", "content": "late"}, USER]}, "stands first", "prompt[1]"),
        ({"prompt": ["hello"]}, "a message is an object", "prompt[0]"),
        ({"prompt": [{"content": "no role"}]}, "met None", "prompt[0]"),
        ({"prompt": [{"role": "user", "content": "  "}]}, "content of the message is empty", "prompt[0]"),
        ({"prompt": 7}, "met int", "prompt"),
        ({"prompt": " \n"}, "the prompt is empty", "prompt"),
        ({"prompt": "q", "label": ["4"]}, "met list", "label"),
        ({"prompt": "q", "label": "a\ud800"}, "lone surrogate", "label"),
        ({"prompt": "q", "label": "\0"}, "NUL", "label"),
        ({"prompt": "q", "label": float("inf")}, "met float", "label"),
        ({"prompt": "q", "reward_model": "42"}, "a struct with ground_truth; met str", "reward_model"),
        ({"prompt": "q", "reward_model": {"style": "rule"}}, "the answer is empty", "reward_model"),
        ({"prompt": "q"}, "the answer is empty", "label"),
        ({}, "the row has nothing", "prompt"),
    ],
)
def test_a_row_that_cannot_be_used_names_reason_and_field(row: dict[str, Any], reason: str, field: str) -> None:
    message, met = refusal({"label": "1", **row} if {"images", "tools", "extra_info"} & set(row) else row)
    assert reason in message and met == field


def test_other_columns_have_a_limit() -> None:
    message, _ = refusal({"prompt": "q", "label": 1, "notes": "x" * (1 << 20)})
    assert "at most 1048576 characters" in message
