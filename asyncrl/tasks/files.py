"""Prompts out of jsonl and parquet files. A row that cannot be used is listed with its number; the rest goes on.

Rows count from 1; of a jsonl file they are its lines, empty ones counted and passed over.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.tasks.generated import ListedPrompts
from asyncrl.tasks.order import keyed_hash
from asyncrl.tasks.prompt import BadRow, Prompt
from asyncrl.tasks.rows import prompt_from_row

__all__ = ["file_prompts", "read_rows"]

_BATCH_ROWS = 1024
_Row = tuple[int, "dict[str, Any] | DataError"]


def file_prompts(task: TaskConfig, reward: str) -> ListedPrompts:
    """All usable rows, split into training and the ``task.eval_size`` held out.

    Rows with the same prompt text fall on the same side.

    Raises:
        ConfigError: no such file, or too few prompts to hold that many out.
        DataError: no usable row, or any bad one where ``task.bad_rows`` is ``fail``.
    """
    prompts, bad_rows = read_rows(task, reward)
    if not prompts:
        first = f"; row {bad_rows[0].row}: {bad_rows[0].reason}" if bad_rows else ""
        raise DataError(f"{task.path} has no usable row, {len(bad_rows)} bad ones{first}")
    texts = sorted({prompt.prompt for prompt in prompts}, key=lambda text: keyed_hash("held out", task.seed, text))
    if task.eval_size >= len(texts):
        raise ConfigError(f"task.eval_size leaves prompts to train on; met {task.eval_size} of {len(texts)} distinct ones in {task.path}")
    chosen = set(texts[: task.eval_size])
    evaluation: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.prompt in chosen:
            evaluation.setdefault(prompt.prompt, prompt)
    training = [prompt for prompt in prompts if prompt.prompt not in chosen]
    return ListedPrompts(training, list(evaluation.values()), tuple(bad_rows))


def read_rows(task: TaskConfig, reward: str) -> tuple[list[Prompt], list[BadRow]]:
    """Prompts of a file in its order, and the rows that cannot be used.

    Raises:
        ConfigError: no such file.
        DataError: the first bad row where ``task.bad_rows`` is ``fail``, or a file that is no parquet.
    """
    path = Path(task.path)
    if not path.is_file():
        raise ConfigError(f"task.path is a file; met {task.path!r}, which is none")
    prompts: list[Prompt] = []
    bad_rows: list[BadRow] = []
    seen: Counter[str] = Counter()
    for number, row in _jsonl(path) if task.name == "jsonl" else _parquet(path):
        try:
            if isinstance(row, DataError):
                raise row
            prompt = prompt_from_row(row, number, task, reward)
            if seen[prompt.prompt_id]:
                raise DataError(f"the id {prompt.prompt_id!r} was met in an earlier row", field="id")
        except DataError as error:
            bad_rows.append(BadRow(row=number, reason=error.message, field=str(error.ids.get("field", ""))))
            if task.bad_rows == "fail":
                raise DataError(f"{path}: row {number}: {error.message}; mend it, or set task.bad_rows=skip", **error.ids) from error
            continue
        seen[prompt.prompt_id] += 1
        prompts.append(prompt)
    return prompts, bad_rows


def _jsonl(path: Path) -> Iterator[_Row]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | DataError:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return DataError(f"the line is not UTF-8: byte {error.start}")
    except RecursionError:
        return DataError("the line is nested too deeply")
    except ValueError as error:
        return DataError(f"the line is not JSON: {error}")
    return row if isinstance(row, dict) else DataError(f"a line is a JSON object; met {type(row).__name__}")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _parquet(path: Path) -> Iterator[_Row]:
    """Rows through ``to_pylist``: pandas would give arrays where lists of messages are meant."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
