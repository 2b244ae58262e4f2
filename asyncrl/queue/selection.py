"""Who is taken for a batch: by admission within the window, freshest first, uniformly, or in proportion to priority.

Consumes groups that may be leased (``add``, ``discard``, ``update``), produces the tickets of a batch (``sample``); waits for nothing.

A draw changes nothing and is a pure function of (seed, step, groups present): neither the order in which they came nor what was
drawn before matters. So a lease that is asked for twice, or again after a recovery, is the same. Random points come from a hash
of (seed, step, number of the draw), cumulated weights are whole numbers in ticket order.

``Fifo`` keeps the staleness bound by its order (:mod:`asyncrl.queue.gate`). The others do not: the gate drops what is too old
before it asks them.

Source: design note, section 4; fault B63. Priorities: Schaul et al., "Prioritized Experience Replay", 2015, equation 1.
"""

from __future__ import annotations

import heapq
from hashlib import blake2b
from typing import Protocol

from asyncrl.errors import ConfigError, DataError, QueueError
from asyncrl.queue.sum_tree import SumTree
from asyncrl.trajectory import GroupMeta

__all__ = ["MAX_PRIORITY", "Freshest", "Prioritised", "Selection", "Uniform", "make_selection"]

KINDS = ("freshest", "uniform", "prioritised")
MAX_PRIORITY = 1e9
MAX_EXPONENT = 4.0
_UNIT = 1 << 32  # weight of priority 1: 32 bits below it, so that priority 0 is drawn once in 4 billion
_DRAW_BITS = 256  # far more than a sum of weights has, so that no remainder favours anyone


class Selection(Protocol):
    """Groups that may be leased, and the rule by which a batch is taken of them."""

    def __len__(self) -> int:
        """Groups present."""

    def add(self, ticket: int, meta: GroupMeta, priority: float) -> None:
        """A group may be leased from now on.

        Raises:
            QueueError: it is there already. DataError: a priority that is not from 0 to 1e9, where it counts.
        """

    def discard(self, ticket: int) -> None:
        """A group may no more be leased; nothing happens if it is not there."""

    def update(self, ticket: int, priority: float) -> None:
        """Another priority for a group; nothing happens if it is not there.

        Raises:
            DataError: a priority that is not from 0 to 1e9, where it counts.
        """

    def sample(self, n: int, key: int) -> list[int]:
        """Up to ``n`` distinct tickets for step ``key``, in the order of training; fewer if fewer may be leased."""


class Freshest:
    """The newest ``oldest_version`` first, of equal ones the lowest ticket.

    Attributes:
        num_entries: what is stored, groups discarded of late included; at most twice the groups present and 64.
    """

    def __init__(self) -> None:
        self._keys: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_entries(self) -> int:
        """Entries of the heap."""
        return len(self._heap)

    def add(self, ticket: int, meta: GroupMeta, priority: float) -> None:
        """See :class:`Selection`."""
        _check_absent(ticket, ticket in self._keys)
        self._keys[ticket] = (-meta.oldest_version, ticket)
        heapq.heappush(self._heap, self._keys[ticket])

    def discard(self, ticket: int) -> None:
        """See :class:`Selection`. Its entry stays in the heap until it comes up or until such ones are the majority."""
        self._keys.pop(ticket, None)
        if len(self._heap) > max(64, 2 * len(self._keys)):
            self._heap = sorted(self._keys.values())

    def update(self, ticket: int, priority: float) -> None:
        """Priorities do not count here."""

    def sample(self, n: int, key: int) -> list[int]:
        """See :class:`Selection`; the same for every ``key``."""
        taken: list[tuple[int, int]] = []
        while self._heap and len(taken) < n:
            entry = heapq.heappop(self._heap)
            if self._keys.get(entry[1]) == entry and (not taken or taken[-1] != entry):
                taken.append(entry)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return [ticket for _, ticket in taken]


class Prioritised:
    """Drawn without replacement, each time in proportion to ``priority ** exponent`` of the groups left.

    Args:
        seed: of the draws. exponent: 0 for equal chances, 1 in proportion to priority.

    Raises:
        ConfigError: an exponent that is not from 0 to 4.
    """

    def __init__(self, seed: int, exponent: float) -> None:
        if not 0.0 <= exponent <= MAX_EXPONENT:
            raise ConfigError(
                f"the exponent of priorities is from 0 to {MAX_EXPONENT:g}; met {exponent}: 0 draws uniformly, 1 in proportion"
            )
        self._seed = seed
        self._exponent = exponent
        self._tree = SumTree()

    def __len__(self) -> int:
        return len(self._tree)

    def add(self, ticket: int, meta: GroupMeta, priority: float) -> None:
        """See :class:`Selection`."""
        _check_absent(ticket, self._tree.get(ticket) > 0)
        self._tree.set(ticket, self._weight(ticket, priority))

    def discard(self, ticket: int) -> None:
        """See :class:`Selection`."""
        self._tree.set(ticket, 0)

    def update(self, ticket: int, priority: float) -> None:
        """See :class:`Selection`."""
        weight = self._weight(ticket, priority)
        if self._tree.get(ticket):
            self._tree.set(ticket, weight)

    def sample(self, n: int, key: int) -> list[int]:
        """See :class:`Selection`."""
        taken: dict[int, int] = {}
        while len(taken) < n and self._tree.total:
            ticket = self._tree.find(_point(self._tree.total, self._seed, key, len(taken)))
            taken[ticket] = self._tree.get(ticket)
            self._tree.set(ticket, 0)
        for ticket, weight in taken.items():
            self._tree.set(ticket, weight)
        return list(taken)

    def _weight(self, ticket: int, priority: float) -> int:
        if not 0.0 <= priority <= MAX_PRIORITY:
            raise DataError(f"a priority is from 0 to {MAX_PRIORITY:g}; met {priority} for ticket {ticket}: scale it down", ticket=ticket)
        scaled: float = priority**self._exponent
        return max(1, round(scaled * _UNIT))


class Uniform(Prioritised):
    """Drawn without replacement with equal chances.

    Args:
        seed: of the draws.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, exponent=0.0)


def make_selection(kind: str, *, seed: int, exponent: float) -> Selection:
    """The selection of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if kind == "freshest":
        return Freshest()
    if kind == "uniform":
        return Uniform(seed)
    if kind == "prioritised":
        return Prioritised(seed, exponent)
    raise ConfigError(f"a selection is one of {', '.join(KINDS)}; met {kind!r}")


def _point(total: int, *key: int) -> int:
    """A point below ``total``, the same for the same key on every machine."""
    digest = blake2b(repr(key).encode(), digest_size=_DRAW_BITS // 8).digest()
    return int.from_bytes(digest, "big") * total >> _DRAW_BITS


def _check_absent(ticket: int, present: bool) -> None:
    if present:
        raise QueueError(f"a group is added once until it is discarded; ticket {ticket} is there already", ticket=ticket)
