"""Prompts made by rule: two-digit sums and digits to copy. Training and held-out sets never meet.

Every problem lies on one side of a split that seed and problem alone decide, so a held-out set of any
size is disjoint from training whatever the other options are.
"""

from __future__ import annotations

import functools

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks.order import Permutation, keyed_hash
from asyncrl.tasks.prompt import BadRow, Prompt
from asyncrl.tasks.templates import fill

__all__ = ["HELD_OUT_SHARE", "ListedPrompts", "copy_digits", "held_out", "is_held_out", "sums"]

HELD_OUT_SHARE = 8  # one problem in so many is held out
SUMS_TEMPLATE = "Question: {question}\nAnswer: {expression} = "
COPY_DIGITS = 4


class ListedPrompts:
    """A set that is small enough to be a list; not to be changed, since generated ones are shared.

    Attributes:
        training, evaluation: disjoint lists of prompts.
    """

    def __init__(self, training: list[Prompt], evaluation: list[Prompt], bad_rows: tuple[BadRow, ...] = ()) -> None:
        self.training = training
        self.evaluation = evaluation
        self.count = len(training)
        self.bad_rows = bad_rows

    def row(self, number: int) -> Prompt:
        """Prompt ``number`` of the training set."""
        return self.training[number]


def is_held_out(problem: str, seed: int) -> bool:
    """Whether a problem belongs to the held-out side of the split of ``seed``."""
    return keyed_hash("held out", seed, problem) % HELD_OUT_SHARE == 0


def held_out(available: list[Prompt], wanted: int) -> list[Prompt]:
    """The first ``wanted`` of the held-out prompts.

    Raises:
        ConfigError: fewer are available.
    """
    if wanted > len(available):
        raise ConfigError(f"task.eval_size is at most the held-out prompts that the task has; met {wanted}, there are {len(available)}")
    return available[:wanted]


def sums(task: TaskConfig) -> ListedPrompts:
    """Sums of two numbers from 10 to 99: 8100 prompts; a + b and b + a lie on the same side of the split."""
    return _sums(task.template or SUMS_TEMPLATE, task.seed)


def copy_digits(task: TaskConfig) -> ListedPrompts:
    """Four digits and ``>``, to be repeated: 10 000 prompts. Ignoring the prompt gets one position in ten right."""
    return _copy_digits(task.template, task.seed)


@functools.lru_cache(maxsize=2)
def _sums(template: str, seed: int) -> ListedPrompts:
    training: list[Prompt] = []
    evaluation: list[Prompt] = []
    for a, b in _shuffled_pairs(seed):
        text = fill(template, f"What is {a} + {b}?")
        prompt = Prompt(prompt_id=f"sums/{a}+{b}", prompt=text, answer=str(a + b))
        side = evaluation if is_held_out(f"{min(a, b)}+{max(a, b)}", seed) else training
        side.append(prompt)
    return ListedPrompts(training, evaluation)


@functools.lru_cache(maxsize=2)
def _copy_digits(template: str, seed: int) -> ListedPrompts:
    training: list[Prompt] = []
    evaluation: list[Prompt] = []
    order = Permutation(10**COPY_DIGITS, "copy", seed)
    for position in range(10**COPY_DIGITS):
        digits = f"{order.forward(position):0{COPY_DIGITS}d}"
        prompt = Prompt(prompt_id=f"copy/{digits}", prompt=fill(template, f"{digits}>"), answer=digits)
        side = evaluation if is_held_out(digits, seed) else training
        side.append(prompt)
    return ListedPrompts(training, evaluation)


def _shuffled_pairs(seed: int) -> list[tuple[int, int]]:
    """All ordered pairs in a seeded order, so that a part of them is a fair sample."""
    order = Permutation(90 * 90, "sums", seed)
    cells = (divmod(order.forward(position), 90) for position in range(90 * 90))
    return [(10 + row, 10 + column) for row, column in cells]
