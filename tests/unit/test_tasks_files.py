"""Files of prompts: hostile rows are listed with number, reason and field, and the rest goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config import Config, TaskConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.tasks import BadRow, new_eval_set, new_source
from asyncrl.tasks.prompt import Prompt

HOSTILE = Path(__file__).parents[1] / "data" / "hostile.jsonl"
REFUSED = {
    "empty prompt list": ("the list of messages is empty", "prompt"),
    "empty prompt": ("the prompt is empty", "prompt"),
    "system only": ("the last message is the user's; met role 'system'", "prompt"),
    "last role assistant": ("the last message is the user's; met role 'assistant'", "prompt"),
    "content null": ("a content is a text; met NoneType", "prompt[0]"),
    "lone surrogate": ("the text holds a lone surrogate, which is no character in UTF-8", "prompt"),
    "NUL byte": ("the text holds a NUL character", "prompt"),
    "label null": ("the answer is empty, and reward final_number compares with it", "label"),
    "duplicate id": ("the id 'twice' was met in an earlier row", "id"),
    "200 kB tool schema": ("tools are not supported", "tools"),
    "unknown role": ("a role is one of system, developer, user, assistant; met 'wizard'", "prompt[0]"),
    "image part": ("a content of parts holds text parts only", "prompt[0]"),
    "label boolean": ("the answer is a text or a number; met the boolean True: write it as text", "label"),
    "label that is no number": (
        "the answer 'four' is not a number, which reward final_number needs; task.reward=exact_text compares text",
        "label",
    ),
    "no prompt column": (
        "no column holds the prompt; looked for prompt, messages, question, source_prompt, the row has case, label, text",
        "prompt",
    ),
}


def task_of(path: Path, **options: Any) -> Config:
    name = "parquet" if path.suffix == ".parquet" else "jsonl"
    return Config(task=TaskConfig(**{"name": name, "path": str(path), "shuffle": False, "epochs": 1, **options}))


def prompts_of(config: Config) -> list[Prompt]:
    source = new_source(config)
    return [source.prompt(index) for index in range(source.size or 0)]


def written(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    return file


def test_every_hostile_row_is_used_or_refused_with_its_number_and_reason() -> None:
    cases = [json.loads(line)["case"] for line in HOSTILE.read_bytes().splitlines()]
    source = new_source(task_of(HOSTILE))
    expected = [BadRow(row=n, reason=REFUSED[c][0], field=REFUSED[c][1]) for n, c in enumerate(cases, 1) if c in REFUSED]
    assert list(source.bad_rows) == expected and len(expected) == len(REFUSED)
    used = [json.loads(source.prompt(index).extra)["case"] for index in range(source.size or 0)]
    assert used == [case for case in cases if case not in REFUSED]


def test_the_usable_hostile_rows_keep_their_text_and_answers() -> None:
    by_case = {json.loads(prompt.extra)["case"]: prompt for prompt in prompts_of(task_of(HOSTILE))}
    assert by_case["emoji"].prompt == "😀 2 + 2 = ?"
    assert [by_case[case].answer for case in ("label number", "label string", "label with separator and spaces")] == ["4", "4", "4,000"]
    assert by_case["missing extra_info"].answer == "7"
    assert by_case["one token more than that"].prompt == "a" * 509


def test_bad_rows_fail_ends_with_the_first_bad_row() -> None:
    with pytest.raises(DataError, match=r"hostile\.jsonl: row 1: the list of messages is empty; mend it, or set task.bad_rows=skip"):
        new_source(task_of(HOSTILE, bad_rows="fail"))


def test_byte_order_mark_windows_line_ends_and_blank_lines_are_read_over(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"prompt": "a", "label": 1}\r\n\r\n{"prompt": "b\xe2\x80\xa8c", "label": "2"}\r\n  \r\n'
    prompts = prompts_of(task_of(written(tmp_path, content)))
    assert [(p.prompt_id, p.prompt, p.answer) for p in prompts] == [("row-1", "a", "1"), ("row-3", "b\u2028c", "2")]


def test_a_last_line_without_an_end_counts(tmp_path: Path) -> None:
    assert [p.prompt for p in prompts_of(task_of(written(tmp_path, b'{"prompt": "a", "label": 1}')))] == ["a"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a"', "the line is not JSON"),
        (b'{"prompt": "\xff", "label": 1}', "the line is not UTF-8: byte 12"),
        (b'["prompt"]', "a line is a JSON object; met list"),
        (b'{"prompt": "a", "label": NaN}', "NaN is not a JSON number"),
        (b"[" * 100_000, "the line is nested too deeply"),
        (b'{"prompt": "a", "label": ' + b"9" * 5000 + b"}", "the line is not JSON: Exceeds the limit"),
    ],
)
def test_a_broken_line_is_listed_and_the_next_one_read(tmp_path: Path, line: bytes, reason: str) -> None:
    source = new_source(task_of(written(tmp_path, line + b'\n{"prompt": "good", "label": 1}\n')))
    assert [bad.row for bad in source.bad_rows] == [1] and reason in source.bad_rows[0].reason
    assert source.prompt(0).prompt == "good" and source.size == 1


def test_a_file_without_a_usable_row_says_what_the_first_one_lacks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no usable row, 1 bad ones; row 1: the prompt is empty"):
        new_source(task_of(written(tmp_path, b'{"prompt": ""}\n')))


@pytest.mark.parametrize("path", ["", "nowhere.jsonl"])
def test_a_missing_file_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.path"):
        new_source(Config(task=TaskConfig(name="jsonl", path=path)))


def test_held_out_rows_are_never_trained_also_where_a_prompt_is_repeated(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n % 10}", "label": n % 10} for n in range(40)]
    config = task_of(written(tmp_path, "".join(json.dumps(row) + "\n" for row in rows).encode()), eval_size=3)
    held = [prompt.prompt for prompt in new_eval_set(config)]
    trained = [prompt.prompt for prompt in prompts_of(config)]
    assert len(held) == len(set(held)) == 3
    assert len(trained) == 28 and not set(held) & set(trained), "seven prompts of four rows each"


def test_holding_out_every_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="met 2 of 2 distinct ones"):
        new_source(task_of(written(tmp_path, b'{"prompt": "a", "label": 1}\n{"prompt": "b", "label": 1}\n'), eval_size=2))


def test_verl_parquet_gives_lists_of_messages_and_lists_tool_rows(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "6 * 7?"}]
    plain = {"prompt": user, "reward_model": {"style": "rule", "ground_truth": "42"}, "extra_info": {"index": "0", "split": "train"}}
    two_turns = {**plain, "prompt": [{"role": "system", "content": "Brief."}, *user]}
    tool = {**plain, "extra_info": {"index": None, "need_tools_kwargs": True, "tools_kwargs": {"calc": {"create_kwargs": {"x": "1"}}}}}
    images = {**plain, "images": [{"path": "a.png"}]}
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([{"images": None, **row} for row in (plain, tool, two_turns, images)]), file)
    source = new_source(task_of(file))
    assert [(bad.row, bad.field) for bad in source.bad_rows] == [(2, "extra_info"), (4, "images")]
    prompts = [source.prompt(index) for index in range(source.size or 0)]
    assert [json.loads(prompt.prompt) for prompt in prompts] == [user, two_turns["prompt"]]
    assert [(p.prompt_id, p.answer) for p in prompts] == [("row-1", "42"), ("row-3", "42")]
    assert json.loads(prompts[0].extra) == {"extra_info": {"index": "0", "split": "train"}}


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        new_source(task_of(file))


@pytest.mark.parametrize("template", ["Answer:", "{questions}"])
def test_a_template_without_a_place_for_the_question_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"holds \{question\} or \{expression\}"):
        new_source(Config(task=TaskConfig(template=template)))
