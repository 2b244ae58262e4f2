"""From one row of a file to a prompt, or to the reason why not.

The shapes of the field are read without being told apart first: ``prompt``, ``messages`` or ``question`` for
the problem; ``label``, ``answer``, ``ground_truth``, ``reward_model.ground_truth`` (verl) or
``reward_spec.ground_truth`` (SkyRL) for the answer. All other columns go to the reward as JSON.
"""

from __future__ import annotations

import json
import math
from typing import Any

from asyncrl.config import TaskConfig
from asyncrl.errors import DataError
from asyncrl.tasks.chat import chat_messages
from asyncrl.tasks.numerals import after_marker
from asyncrl.tasks.prompt import Prompt
from asyncrl.tasks.rewards import answer_fault
from asyncrl.tasks.templates import fill

__all__ = ["prompt_from_row"]

_PROMPT_KEYS = ("prompt", "messages", "question", "source_prompt")
_LABEL_KEYS = ("label", "answer", "ground_truth")
_NESTED_LABELS = ("reward_model", "reward_spec")
_MEDIA_KEYS = ("images", "image", "videos", "video", "audio", "audios")
_MAX_EXTRA_CHARACTERS = 1 << 20


def prompt_from_row(row: dict[str, Any], number: int, task: TaskConfig, reward: str) -> Prompt:
    """The prompt of row ``number``.

    Args:
        row: columns as plain Python values.
        reward: name of the reward, which decides whether the answer will do.

    Raises:
        DataError: with ``field``, the column at fault.
    """
    row = {key: value for key, value in row.items() if value is not None}
    _refuse_unsupported(row)
    prompt_key, label_key = _prompt_key(row, task), _label_key(row, task)
    text, is_chat = _problem(row[prompt_key], prompt_key, task)
    answer = _answer(row, label_key)
    fault = answer_fault(reward, answer)
    if fault:
        raise DataError(fault, field=label_key or task.label_key)
    extra = {key: value for key, value in row.items() if key not in (prompt_key, label_key)}
    return Prompt(prompt_id=_identity(row, number), prompt=text, is_chat=is_chat, answer=answer, extra=_extra_json(extra))


def _prompt_key(row: dict[str, Any], task: TaskConfig) -> str:
    keys = (task.prompt_key, *_PROMPT_KEYS)
    found = next((key for key in keys if key in row), None)
    if found is None:
        raise DataError(
            f"no column holds the prompt; looked for {', '.join(dict.fromkeys(keys))}, the row has {', '.join(sorted(row)) or 'nothing'}",
            field=task.prompt_key,
        )
    return found


def _label_key(row: dict[str, Any], task: TaskConfig) -> str:
    keys = (task.label_key, *_LABEL_KEYS, *_NESTED_LABELS)
    return next((key for key in keys if key in row), "")


def _problem(value: Any, key: str, task: TaskConfig) -> tuple[str, bool]:
    """Text of the prompt and whether it is chat messages."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError("the prompt is empty", field=key)
        return _clean(fill(task.template, value), key), False
    messages = chat_messages(value, key)
    if task.template:
        if len(messages) > 1:
            raise DataError(f"task.template goes around a prompt of one message; this one has {len(messages)}", field=key)
        return _clean(fill(task.template, messages[0]["content"]), key), False
    if task.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": task.system}, *messages]
    for message in messages:
        _clean(message["content"], key)
    return json.dumps(messages, ensure_ascii=False), True


def _clean(text: str, key: str) -> str:
    """The text, if every tokenizer can encode it."""
    if "\0" in text:
        raise DataError("the text holds a NUL character", field=key)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError("the text holds a lone surrogate, which is no character in UTF-8", field=key)
    return text


def _answer(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if key in _NESTED_LABELS:
        if not isinstance(value, dict):
            raise DataError(f"{key} is a struct with ground_truth; met {type(value).__name__}", field=key)
        value, key = value.get("ground_truth"), f"{key}.ground_truth"
    if value is None:
        return ""
    if isinstance(value, bool):
        raise DataError(f"the answer is a text or a number; met the boolean {value}: write it as text", field=key)
    if isinstance(value, str):
        return _clean(after_marker(value), key)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    raise DataError(f"the answer is a text or a finite number; met {type(value).__name__}", field=key)


def _refuse_unsupported(row: dict[str, Any]) -> None:
    for key in _MEDIA_KEYS:
        if row.get(key):
            raise DataError("images, video and audio are not supported", field=key)
    if row.get("tools"):
        raise DataError("tools are not supported", field="tools")
    info = row.get("extra_info")
    if isinstance(info, dict) and any(info.get(key) for key in ("need_tools_kwargs", "tools_kwargs", "interaction_kwargs")):
        raise DataError("tools and interactions are not supported", field="extra_info")


def _identity(row: dict[str, Any], number: int) -> str:
    """The row's own ``id``, or its number."""
    own = row.get("id")
    if isinstance(own, (str, int)) and not isinstance(own, bool) and str(own).strip():
        return _clean(str(own).strip()[:200], "id")
    return f"row-{number}"


def _extra_json(extra: dict[str, Any]) -> str:
    try:
        text = json.dumps(_without_nulls(extra), ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"the other columns cannot be written as JSON: {error}", field="") from error
    if len(text) > _MAX_EXTRA_CHARACTERS:
        raise DataError(f"the other columns take at most {_MAX_EXTRA_CHARACTERS} characters as JSON; met {len(text)}", field="")
    return _clean(text, "")


def _without_nulls(value: Any) -> Any:
    """Arrow gives the rows of one struct column all its members; those that a row did not have come as None."""
    if isinstance(value, dict):
        return {key: _without_nulls(member) for key, member in value.items() if member is not None}
    return [_without_nulls(member) for member in value] if isinstance(value, list) else value
