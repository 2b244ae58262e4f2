"""Requests that wait for their answer: who is looked at again, and when.

Consumes changes of the gate, produces the requests worth another look. A ticket request is looked at again when its producer said a
newer version, when the gate's epoch rose, or when its time is over; lease requests after every burst. Producers with
a version at which the gate was just found shut are passed over: the rule of admission is monotone in the version, but for lockstep.

Source: design note, section 4.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncrl.queue.messages import LeaseRequest, Request
from asyncrl.queue.sessions import Session

__all__ = ["Waiting", "WaitingRoom"]


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """A request without an answer yet; ``deaths`` counts producers that had died when it came; ``number`` is its place."""

    session: Session
    request: Request
    until_s: float
    deaths: int
    number: int = -1

    @property
    def is_lease(self) -> bool:
        """Whether a learner waits."""
        return isinstance(self.request.body, LeaseRequest)


@dataclass(slots=True)
class WaitingRoom:
    """All waiting requests of one broker, in order of arrival."""

    _tickets: dict[int, Waiting] = field(default_factory=dict)
    _leases: dict[int, Waiting] = field(default_factory=dict)
    _by_sender: dict[str, dict[int, None]] = field(default_factory=dict)
    _ends: list[tuple[float, int]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._tickets) + len(self._leases)

    def add(self, waiting: Waiting) -> None:
        """A request begins to wait."""
        number = waiting.number = next(self._numbers)
        (self._leases if waiting.is_lease else self._tickets)[number] = waiting
        self._by_sender.setdefault(waiting.session.sender, {})[number] = None
        heapq.heappush(self._ends, (waiting.until_s, number))

    def over(self, now_s: float) -> list[Waiting]:
        """Requests whose time is over."""
        found = []
        while self._ends and self._ends[0][0] <= now_s:
            number = heapq.heappop(self._ends)[1]
            waiting = self._tickets.get(number) or self._leases.get(number)
            if waiting is not None:
                found.append(waiting)
        return found

    def leases(self) -> list[Waiting]:
        """Learners that wait."""
        return list(self._leases.values())

    def tickets(self) -> list[Waiting]:
        """Producers that wait, first come first."""
        return list(self._tickets.values())

    def of(self, sender: str) -> list[Waiting]:
        """What one sender waits for."""
        found = (self._tickets.get(number) or self._leases.get(number) for number in self._by_sender.get(sender, ()))
        return [waiting for waiting in found if waiting is not None]

    def remove(self, waiting: Waiting) -> None:
        """It has its answer."""
        if (self._leases if waiting.is_lease else self._tickets).pop(waiting.number, None) is None:
            return
        mine = self._by_sender[waiting.session.sender]
        del mine[waiting.number]
        if not mine:
            del self._by_sender[waiting.session.sender]

    def forget(self, sender: str) -> None:
        """The sender is gone."""
        for waiting in self.of(sender):
            self.remove(waiting)

    def senders(self) -> list[str]:
        """Names of all that wait."""
        return sorted(self._by_sender)
