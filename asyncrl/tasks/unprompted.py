"""Tickets without prompts: for trainers that look up data of their own by the number of a ticket."""

from __future__ import annotations

from asyncrl.config import TaskConfig
from asyncrl.errors import DataError
from asyncrl.tasks.prompt import BadRow, Prompt

__all__ = ["NoPrompts"]


class NoPrompts:
    """``task.size`` numbers, ``task.epochs`` times in order; without end where either is 0.

    Example:
        >>> NoPrompts(TaskConfig(name="none", size=3, epochs=2)).prompt(4).prompt_id
        '1'
    """

    bad_rows: tuple[BadRow, ...] = ()

    def __init__(self, task: TaskConfig) -> None:
        self._count = task.size
        self._epochs = task.epochs

    @property
    def size(self) -> int | None:
        """Number of indices, all epochs together; None if there is no end."""
        return self._count * self._epochs or None

    def prompt(self, index: int) -> Prompt:
        """An empty prompt that is named by its number within the epoch.

        Raises:
            DataError: ``index`` is negative or not below ``size``.
        """
        if index < 0 or (self.size is not None and index >= self.size):
            raise DataError(f"a prompt index is 0 or more and below {self.size}; met {index}")
        return Prompt(prompt_id=str(index % self._count if self._count else index), prompt="")
