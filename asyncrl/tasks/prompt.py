"""What a task hands out: a prompt, a source of prompts by index, a row that could not be used, a reward.

Loads with the standard library alone; the queue takes prompts from here, generators take rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["BadRow", "Prompt", "PromptSource", "Reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem.

    Attributes:
        prompt_id: names the problem in logs and metrics; the same in every epoch.
        prompt: text or, where ``is_chat``, JSON of a list of {role, content} that ends with the user's turn.
        is_chat: whether the model's chat template is to be applied.
        answer: what the reward compares with; empty if the data has none.
        extra: JSON object with all other columns of the row, for the reward.

    Example:
        >>> Prompt(prompt_id="sums/23+45", prompt="What is 23 + 45?", answer="68").is_chat
        False
    """

    prompt_id: str
    prompt: str
    is_chat: bool = False
    answer: str = ""
    extra: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be used: its number in the file (from 1), why not, and the field at fault (empty: the whole row)."""

    row: int
    reason: str
    field: str = ""


class PromptSource(Protocol):
    """Prompts in training order. Ticket number ``n`` is prompt index ``n``; epochs follow one another."""

    @property
    def size(self) -> int | None:
        """Number of indices, all epochs together; None if there is no end."""

    def prompt(self, index: int) -> Prompt:
        """The prompt at ``index``, a pure function of the options and ``index``.

        Raises:
            DataError: ``index`` is negative or not below ``size``.
        """


class Reward(Protocol):
    """Scores one response. Called in a thread, with a time limit set by the caller."""

    @property
    def name(self) -> str:
        """Registered name, or ``module:function``."""

    def score(self, prompt: Prompt, response: str) -> tuple[float, dict[str, float]]:
        """Reward and its named parts.

        Raises:
            DataError: the reward came back as something that cannot be trained on.
        """
