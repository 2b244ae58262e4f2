"""Counts that must add up: ``admitted = trained + sum(dropped) + in_flight``, and the frontier that a checkpoint keeps.

A ticket is settled once it is trained or dropped. The frontier names every settled ticket: all below ``low`` and
those listed above it. A cursor would not do: tickets behind it may be unsettled (fault B58).

Source: design note, section 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from asyncrl.errors import DataError
from asyncrl.queue.messages import DropReason, Frontier

__all__ = ["EMPTY", "Ledger", "check_frontier", "frontier_problem", "merge_frontiers", "split_frontier"]


EMPTY = Frontier(steps=0, low=0, settled_above=(), trained=0, dropped={})
"""The frontier before the first step: what a trainer without a checkpoint starts from."""


def check_frontier(frontier: Frontier) -> None:
    """Whether the frontier of a whole queue, as a checkpoint has it, adds up.

    Raises:
        DataError: it does not.
    """
    problem = frontier_problem(frontier)
    if problem:
        raise DataError(f"{problem}: the checkpoint's manifest is damaged")


def frontier_problem(frontier: Frontier) -> str:
    """What does not add up in the frontier of a whole queue; empty if it counts from 0 on, and as many tickets as it settles.

    Example:
        >>> frontier_problem(EMPTY)
        ''
    """
    unknown = set(frontier.dropped) - set(DropReason)
    if unknown or min(frontier.steps, frontier.low, frontier.trained, *frontier.dropped.values()) < 0:
        return (
            f"a frontier counts from 0 on, and its reasons are {', '.join(DropReason)}; met steps={frontier.steps}, low={frontier.low}, "
            f"trained={frontier.trained}, dropped={frontier.dropped}"
        )
    settled = frontier.low + len(frontier.settled_above)
    dropped = sum(count for reason, count in frontier.dropped.items() if reason != DropReason.ABANDONED)
    if settled != frontier.trained + dropped or any(ticket < frontier.low for ticket in frontier.settled_above):
        return (
            f"a frontier settles as many tickets as it counts; met low={frontier.low} and {len(frontier.settled_above)} above it, "
            f"but {frontier.trained} trained and {dropped} dropped"
        )
    return ""


def split_frontier(frontier: Frontier, shard: int, shards: int) -> Frontier:
    """What one shard has to know of the frontier of a whole queue; the counts live on in shard 0.

    Raises:
        DataError: the frontier does not add up.
    """
    check_frontier(frontier)
    return Frontier(
        steps=frontier.steps,
        low=frontier.low + (shard - frontier.low) % shards,
        settled_above=tuple(ticket for ticket in frontier.settled_above if ticket % shards == shard),
        trained=frontier.trained if shard == 0 else 0,
        dropped=dict(frontier.dropped) if shard == 0 else {},
    )


def merge_frontiers(shards: Sequence[Frontier]) -> Frontier:
    """The frontier of a whole queue from those of its shards in order; it can be split among any number of them.

    Example:
        >>> shard = Frontier(steps=1, low=2, settled_above=(), trained=1, dropped={})
        >>> other = Frontier(steps=1, low=5, settled_above=(), trained=2, dropped={})
        >>> merge_frontiers([shard, other])
        Frontier(steps=1, low=2, settled_above=(3,), trained=3, dropped={})
    """
    low = min(frontier.low for frontier in shards)
    above: set[int] = set()
    dropped: Counter[str] = Counter()
    for number, frontier in enumerate(shards):
        first = low + (number - low) % len(shards)
        above.update(range(first, frontier.low, len(shards)), frontier.settled_above)
        dropped.update(frontier.dropped)
    return Frontier(
        steps=max(frontier.steps for frontier in shards),
        low=low,
        settled_above=tuple(sorted(above)),
        trained=sum(frontier.trained for frontier in shards),
        dropped=dict(sorted(dropped.items())),
    )


class Ledger:
    """Settled tickets and counts of one shard, which owns the tickets ``shard``, ``shard + shards``, …


    Example:
        >>> ledger = Ledger()
        >>> [ledger.admit() for _ in range(3)]
        [0, 1, 2]
        >>> ledger.train(1)
        >>> ledger.low, ledger.settled_above, ledger.in_flight
        (0, {1}, 2)
    """

    def __init__(self, frontier: Frontier = EMPTY, shard: int = 0, shards: int = 1) -> None:
        self._stride = shards
        self.steps = frontier.steps
        self.low = frontier.low + (shard - frontier.low) % shards
        self.settled_above = set(frontier.settled_above)
        self.trained = frontier.trained
        self.dropped = Counter({DropReason(reason): count for reason, count in frontier.dropped.items()})
        self.admitted = self.trained + self.dropped.total()
        self._readmitted: set[int] = set()
        self._raise_low()
        self._cursor = self.low
        self._skip_settled()

    @property
    def in_flight(self) -> int:
        """Groups admitted and not settled."""
        return self.admitted - self.trained - self.dropped.total()

    @property
    def next_ticket(self) -> int:
        """The ticket that :meth:`admit` would give: the lowest that is neither settled nor in flight."""
        return self._cursor

    def admit(self) -> int:
        """Admits the next ticket."""
        ticket = self._cursor
        self.admitted += 1
        self._cursor += self._stride
        self._skip_settled()
        return ticket

    def readmit(self, ticket: int) -> None:
        """A ticket that was admitted before a recovery or a restore is in flight again."""
        self.admitted += 1
        self._readmitted.add(ticket)
        self._skip_settled()

    def skip_to(self, ticket: int) -> None:
        """No ticket below this one is new."""
        self._cursor = max(self._cursor, ticket)
        self._readmitted = {other for other in self._readmitted if other >= self._cursor}
        self._skip_settled()

    def abandon(self, groups: int) -> None:
        """Groups beyond a restored frontier count as admitted and given up; their tickets are live once more."""
        self.admitted += groups
        self.dropped[DropReason.ABANDONED] += groups

    def train(self, ticket: int) -> None:
        """The ticket's group is in the weights."""
        self.trained += 1
        self._settle(ticket)

    def drop(self, ticket: int, reason: DropReason) -> None:
        """The ticket's group will never be trained."""
        self.dropped[reason] += 1
        self._settle(ticket)

    def is_settled(self, ticket: int) -> bool:
        """Whether it was trained or dropped."""
        return ticket < self.low or ticket in self.settled_above

    def frontier(self) -> Frontier:
        """What a checkpoint keeps of the queue."""
        return Frontier(
            steps=self.steps,
            low=self.low,
            settled_above=tuple(sorted(self.settled_above)),
            trained=self.trained,
            dropped=self.dropped_counts(),
        )

    def dropped_counts(self) -> dict[str, int]:
        """Dropped groups by reason, only those that occurred."""
        return {reason.value: count for reason, count in sorted(self.dropped.items()) if count}

    def _settle(self, ticket: int) -> None:
        assert not self.is_settled(ticket), f"ticket {ticket} settled twice"
        self.settled_above.add(ticket)
        self._raise_low()

    def _raise_low(self) -> None:
        while self.low in self.settled_above:
            self.settled_above.remove(self.low)
            self.low += self._stride

    def _skip_settled(self) -> None:
        while self._cursor in self.settled_above or self._cursor in self._readmitted:
            self._readmitted.discard(self._cursor)
            self._cursor += self._stride
