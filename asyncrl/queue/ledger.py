"""Counts that must add up: ``admitted = trained + sum(dropped) + in_flight``, and the frontier that a checkpoint keeps.

A ticket is settled once it is trained or dropped. The frontier names every settled ticket: all below ``low`` and
those listed above it. A cursor would not do: tickets behind it may be unsettled (fault B58).

Source: design note, section 4.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.errors import DataError
from asyncrl.queue.messages import DropReason, Frontier

__all__ = ["Ledger"]


class Ledger:
    """Settled tickets and counts.

    Example:
        >>> ledger = Ledger()
        >>> [ledger.admit() for _ in range(3)]
        [0, 1, 2]
        >>> ledger.train(1)
        >>> ledger.low, ledger.settled_above, ledger.in_flight
        (0, {1}, 2)
    """

    def __init__(self, frontier: Frontier | None = None) -> None:
        self.steps = frontier.steps if frontier else 0
        self.low = frontier.low if frontier else 0
        self.settled_above = set(frontier.settled_above) if frontier else set()
        self.trained = frontier.trained if frontier else 0
        self.dropped = Counter({DropReason(reason): count for reason, count in frontier.dropped.items()} if frontier else {})
        self.admitted = self.trained + self.dropped.total()
        self._check_restored()
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
        self._cursor += 1
        self._skip_settled()
        return ticket

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
        while self.low in self.settled_above:
            self.settled_above.remove(self.low)
            self.low += 1

    def _skip_settled(self) -> None:
        while self._cursor in self.settled_above:
            self._cursor += 1

    def _check_restored(self) -> None:
        settled = self.low + len(self.settled_above)
        if settled != self.admitted or any(ticket < self.low for ticket in self.settled_above):
            raise DataError(
                f"a frontier settles as many tickets as it counts; met low={self.low} and {len(self.settled_above)} above it, "
                f"but {self.trained} trained and {self.dropped.total()} dropped: the checkpoint's manifest is damaged"
            )
