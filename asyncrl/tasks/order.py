"""The order in which prompts are visited: index-addressable, a pure function of seed and index.

Consumes a finite set of prompts, produces :class:`OrderedSource`. No order is stored: a resumed run
asks for index 50 001 and gets what the first run would have got.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.tasks.prompt import BadRow, Prompt

__all__ = ["OrderedSource", "Permutation", "PromptSet", "keyed_hash"]

_ROUNDS = 4
_WORD = (1 << 64) - 1


def keyed_hash(*parts: object) -> int:
    """64-bit hash of the parts, the same on every machine and Python version."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _scramble(key: int, number: int, value: int) -> int:
    """The round function: splitmix64 of key, round and value, many times faster than a hash of text.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014, mix64 variant 13.
    """
    word = key + 0x9E3779B97F4A7C15 * (value * _ROUNDS + number + 1) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


class Permutation:
    """A seeded bijection of ``range(size)`` in constant memory: a Feistel network with cycle walking.

    Args:
        size: number of elements, at least 1.
        *key: what it depends on (a seed, an epoch).

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 5.

    Example:
        >>> p = Permutation(5, "seed", 0)
        >>> sorted(p.forward(i) for i in range(5)), p.backward(p.forward(3))
        ([0, 1, 2, 3, 4], 3)
    """

    def __init__(self, size: int, *key: object) -> None:
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        self._key = keyed_hash(*key)

    def forward(self, index: int) -> int:
        """The element at position ``index``."""
        return self._walk(index, range(_ROUNDS), self._mix)

    def backward(self, element: int) -> int:
        """The position of ``element``."""
        return self._walk(element, range(_ROUNDS - 1, -1, -1), self._unmix)

    def _walk(self, value: int, rounds: range, step: Callable[[int, int], int]) -> int:
        while True:
            for number in rounds:
                value = step(value, number)
            if value < self._size:
                return value

    def _mix(self, value: int, number: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        return right << self._half_bits | (left ^ _scramble(self._key, number, right) & self._mask)

    def _unmix(self, value: int, number: int) -> int:
        right, mixed = value >> self._half_bits, value & self._mask
        return (mixed ^ _scramble(self._key, number, right) & self._mask) << self._half_bits | right


class PromptSet(Protocol):
    """A finite training set without an order."""

    count: int
    bad_rows: tuple[BadRow, ...]

    def row(self, number: int) -> Prompt:
        """Prompt ``number`` of ``range(count)``, always the same one."""


class OrderedSource:
    """The training set in the order of the options ``size``, ``epochs``, ``shuffle``, ``permute_answers``.

    Attributes:
        bad_rows: rows of the file that were skipped, with their reasons.

    Raises:
        ConfigError: more prompts asked for than there are, or too few to permute.
    """

    def __init__(self, prompts: PromptSet, task: TaskConfig) -> None:
        if task.size > prompts.count:
            raise ConfigError(
                f"task.size is at most the number of prompts; met {task.size}, the source has {prompts.count}: lower it, or set 0 for all"
            )
        self._prompts = prompts
        self._task = task
        self._count = task.size or prompts.count
        self.bad_rows = prompts.bad_rows
        if task.permute_answers and self._count < 2:
            raise ConfigError(f"task.permute_answers needs two prompts or more; met {self._count}")
        self._partners = Permutation(self._count, "partners", task.seed)
        self._epoch = (0, Permutation(self._count, "order", task.seed, 0))

    @property
    def size(self) -> int | None:
        """Number of indices, all epochs together; None if there is no end."""
        return self._count * self._task.epochs or None

    def prompt(self, index: int) -> Prompt:
        """The prompt at ``index``.

        Raises:
            DataError: ``index`` is negative or not below ``size``.
        """
        if index < 0 or (self.size is not None and index >= self.size):
            raise DataError(f"a prompt index is 0 or more and below {self.size}; met {index}")
        epoch, position = divmod(index, self._count)
        number = self._order(epoch).forward(position) if self._task.shuffle else position
        prompt = self._prompts.row(number)
        if not self._task.permute_answers:
            return prompt
        other = self._prompts.row(self._partner(number))
        return dataclasses.replace(prompt, answer=other.answer, extra=other.extra)

    def _order(self, epoch: int) -> Permutation:
        if self._epoch[0] != epoch:
            self._epoch = (epoch, Permutation(self._count, "order", self._task.seed, epoch))
        return self._epoch[1]

    def _partner(self, number: int) -> int:
        """The next element of one cycle through all prompts: never ``number`` itself."""
        return self._partners.forward((self._partners.backward(number) + 1) % self._count)
