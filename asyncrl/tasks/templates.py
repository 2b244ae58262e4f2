"""Putting a template around a question: plain text in, plain text out."""

from __future__ import annotations

import re

from asyncrl.errors import ConfigError

__all__ = ["check_template", "expression_of", "fill"]

_FIELDS = re.compile(r"\{(question|expression)\}")
_PHRASES = ("What is ", "Calculate ", "State the final answer to the following arithmetic problem: ")


def check_template(template: str) -> None:
    """Refuses a template that would show every prompt the same text.

    Raises:
        ConfigError: neither placeholder is in it.
    """
    if template and not _FIELDS.search(template):
        raise ConfigError(f"task.template holds {{question}} or {{expression}}; met {template!r}: add one, or leave it empty")


def expression_of(question: str) -> str:
    """The bare arithmetic of a question.

    Example:
        >>> expression_of("State the final answer to the following arithmetic problem: 23 + 45 =")
        '23 + 45'
    """
    for phrase in _PHRASES:
        question = question.replace(phrase, "")
    return question.replace("?", "").rstrip(".").rstrip(" =").strip()


def fill(template: str, question: str) -> str:
    """The template with its placeholders replaced, each once and as text; an empty template gives the question.

    Example:
        >>> fill("Question: {question}\\nAnswer: {expression} = ", "What is 23 + 45?")
        'Question: What is 23 + 45?\\nAnswer: 23 + 45 = '
    """
    if not template:
        return question
    values = {"question": question, "expression": expression_of(question)}
    return _FIELDS.sub(lambda match: values[match.group(1)], template)
