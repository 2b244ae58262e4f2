"""Checks of chat messages: what a rollout can start from, and nothing that it would silently lose."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import DataError

__all__ = ["chat_messages"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def chat_messages(value: Any, key: str) -> list[dict[str, str]]:
    """Messages as {role, content} with text contents; ``developer`` reads as ``system``.

    Raises:
        DataError: with ``field``: not a list of messages, empty, an unknown role, a tool call, a content without
            text, or an end from which no assistant's turn follows.
    """
    if not isinstance(value, list):
        raise DataError(f"a prompt is a text or a list of messages; met {type(value).__name__}", field=key)
    if not value:
        raise DataError("the list of messages is empty", field=key)
    messages = [_message(message, f"{key}[{place}]") for place, message in enumerate(value)]
    if messages[-1]["role"] != "user":
        raise DataError(f"the last message is the user's; met role {messages[-1]['role']!r}", field=key)
    late = [place for place, message in enumerate(messages) if place and message["role"] == "system"]
    if late:
        raise DataError("a system message stands first or not at all", field=f"{key}[{late[0]}]")
    return messages


def _message(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise DataError(f"a message is an object with role and content; met {type(message).__name__}", field=place)
    role = message.get("role")
    if message.get("tool_calls") or message.get("tool_call_id") or role == "tool":
        raise DataError("tool calls and their results are not supported", field=place)
    if not isinstance(role, str) or role not in _ROLES:
        raise DataError(f"a role is one of {', '.join(_ROLES)}; met {role!r}", field=place)
    content = _content(message.get("content"), place)
    if not content.strip():
        raise DataError("the content of the message is empty", field=place)
    return {"role": _ROLES[role], "content": content}


def _content(content: Any, place: str) -> str:
    """The text, or the texts of all parts joined."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise DataError("a content of parts holds text parts only", field=place)
        return "".join(part for part in parts if part)
    if not isinstance(content, str):
        raise DataError(f"a content is a text; met {type(content).__name__}", field=place)
    return content
