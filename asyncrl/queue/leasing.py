"""Leases: a batch is handed to the learner and ends by commit, by return or by fencing, never by time.

Source: design note, section 4; faults B53, B58.
"""

from __future__ import annotations

from collections import Counter

from asyncrl.errors import FencedError, QueueError
from asyncrl.queue.book import Book
from asyncrl.queue.lockstep import slots_of_step
from asyncrl.queue.messages import DropReason
from asyncrl.queue.records import Blocked, GroupRecord, GroupState, LeaseGranted
from asyncrl.queue.window import choose

__all__ = ["Leasing"]


class Leasing:
    """At most one lease at a time, of the step after the committed ones.

    Attributes:
        incarnation: of the learner that may lease; it only rises.
        lag_consumed: tokens of the last committed step by lag in versions.
    """

    def __init__(self, book: Book, incarnation: int) -> None:
        self._book = book
        self.incarnation = incarnation
        self.lag_consumed: dict[int, int] = {}
        self._leased: list[GroupRecord] = []
        self._overtakes: Counter[int] = Counter()

    @property
    def num_leased(self) -> int:
        """Groups leased now."""
        return len(self._leased)

    def fence(self, incarnation: int) -> None:
        """A learner of this incarnation is there: older ones lease and commit no more, their groups come back.

        Raises:
            FencedError: a newer one has been seen.
        """
        if incarnation < self.incarnation:
            raise FencedError(
                f"a learner of incarnation {self.incarnation} has taken over; met incarnation {incarnation}: end this process",
                incarnation=incarnation,
            )
        if incarnation > self.incarnation:
            self.incarnation = incarnation
            self._give_back()

    def lease(self, step: int, incarnation: int, stopping: bool) -> LeaseGranted | Blocked:
        """The batch of ``step``; asking twice gives the same one.

        Raises:
            FencedError: an older incarnation. QueueError: another step than the next one.
        """
        self._check(step, incarnation)
        if not self._leased:
            blocked = self._form(step, stopping)
            if blocked is not None:
                return blocked
        return LeaseGranted(step=step, groups_G=tuple(r.meta for r in self._leased if r.meta is not None))

    def commit(self, step: int, incarnation: int) -> None:
        """The leased batch of ``step`` is in the weights.

        Raises:
            FencedError: an older incarnation. QueueError: no such lease.
        """
        self._check(step, incarnation)
        if not self._leased:
            raise QueueError(f"a commit ends a lease; step {step} was not leased, or was returned: lease it first", step=step)
        lag: Counter[int] = Counter()
        for record in self._leased:
            assert record.meta is not None
            if self._book.settings.replace_no_signal and not record.meta.has_signal:
                self._book.drop(record, DropReason.NO_SIGNAL)
                continue
            for version, tokens in record.meta.tokens_by_version.items():
                lag[step - version] += tokens
            self._book.train(record)
        self._leased, self._overtakes = [], Counter()
        self._book.ledger.steps += 1
        self._book.replaced_this_step = 0
        self.lag_consumed = dict(sorted(lag.items()))

    def return_(self, step: int, incarnation: int) -> None:
        """The batch comes back untrained; without a lease nothing happens.

        Raises:
            FencedError: an older incarnation. QueueError: another step than the leased one.
        """
        self._check(step, incarnation)
        self._give_back()

    def _check(self, step: int, incarnation: int) -> None:
        if incarnation != self.incarnation:
            self.fence(incarnation)
        if step != self._book.ledger.steps:
            raise QueueError(
                f"{self._book.ledger.steps} steps are committed, so the next is step {self._book.ledger.steps}; met step {step}: "
                "the learner and the queue must start from one checkpoint",
                step=step,
            )

    def _form(self, step: int, stopping: bool) -> Blocked | None:
        settings = self._book.settings
        if settings.lockstep:
            records, reason = slots_of_step(self._book, step)
            overtakes: Counter[int] = Counter()
            partial = settings.total_tickets is not None and settings.groups_per_step * (step + 1) > settings.total_tickets
        else:
            records, overtakes, reason = self._windowed(step)
            partial = len(records) < settings.groups_per_step
        if partial and settings.drop_last_batch:
            for record in records:
                self._book.drop(record, DropReason.LAST_BATCH)
            records = []
        if not records:
            return self._nothing(reason, stopping)
        self._leased, self._overtakes = records, overtakes
        for record in records:
            record.state = GroupState.LEASED
        self._add_overtakes(1)
        return None

    def _nothing(self, reason: str, stopping: bool) -> Blocked:
        if not reason:
            return Blocked(reason="the prompts are used up", ended=True)
        if stopping:
            return Blocked(reason=f"the queue was stopped; {reason}", ended=True)
        return Blocked(reason=reason)

    def _windowed(self, step: int) -> tuple[list[GroupRecord], Counter[int], str]:
        groups, book = self._book.settings.groups_per_step, self._book
        chosen, overtakes = choose(book.live(), groups, book.settings.window)
        rest = book.exhausted and len(chosen) == book.num_live
        if len(chosen) == groups or rest:
            return chosen, overtakes, ""
        unfinished = next((r for r in book.live() if not r.finished), None)
        waiting = f"{book.num_live} groups are live"
        if unfinished is not None:
            waiting = f"ticket {unfinished.ticket}, attempt {unfinished.attempt}, is {unfinished.state.value} at {unfinished.producer}"
        return [], Counter(), f"step {step} has {len(chosen)} of {groups} groups that may be leased; {waiting}"

    def _give_back(self) -> None:
        self._add_overtakes(-1)
        for record in self._leased:
            record.state = GroupState.QUEUED
        self._leased, self._overtakes = [], Counter()

    def _add_overtakes(self, sign: int) -> None:
        for ticket, number in self._overtakes.items():
            record = self._book.get(ticket)
            if record is not None:
                record.overtaken += sign * number
