"""Leases: a batch is handed to the learner and ends by commit, by return or by fencing, never by time.

Source: design note, section 4; faults B53, B58.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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
        last_commit: step and incarnation of the last commit.
    """

    def __init__(self, book: Book, incarnation: int) -> None:
        self._book = book
        self.incarnation = incarnation
        self.lag_consumed: dict[int, int] = {}
        self.last_commit: tuple[int, int] | None = None
        self._leased: list[GroupRecord] = []
        self._overtakes: Counter[int] = Counter()

    @property
    def lease_out(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """Tickets of the batch that is out, in training order, and the overtaking that it caused."""
        return tuple(record.ticket for record in self._leased), dict(self._overtakes)

    def take_up(self, tickets: Iterable[int], overtakes: dict[int, int]) -> None:
        """The batch that was out when the process died."""
        self._leased = [record for record in map(self._book.get, tickets) if record is not None]
        self._overtakes = Counter(overtakes)

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

    def lease(self, step: int, incarnation: int, extra: int, stopping: bool) -> LeaseGranted | Blocked:
        """The batch of ``step``; asking twice gives the same one. ``extra`` groups more are taken if they are there.

        Raises:
            FencedError: an older incarnation. QueueError: another step than the next one.
        """
        self._check(step, incarnation)
        if not self._leased:
            blocked = self._form(step, extra, stopping)
            if blocked is not None:
                return blocked
        return LeaseGranted(step=step, groups_G=tuple(r.meta for r in self._leased if r.meta is not None))

    def commit(self, step: int, incarnation: int) -> None:
        """The leased batch of ``step`` is in the weights; the same commit again changes nothing. A shard that had nothing to
        give commits an empty batch.

        Raises:
            FencedError: an older incarnation. QueueError: no such lease.
        """
        if self.last_commit == (step, incarnation):
            return
        self._check(step, incarnation)
        if not self._leased and self._book.settings.shards == 1:
            raise QueueError(f"a commit ends a lease; step {step} was not leased, or was returned: lease it first", step=step)
        lag: Counter[int] = Counter()
        leased, self._leased, self._overtakes = self._leased, [], Counter()
        self._book.sampled += len(leased)
        for record in leased:
            assert record.meta is not None
            if self._book.settings.replace_no_signal and not record.meta.has_signal:
                self._book.write_off(record.uses + 1)
                self._book.drop(record, DropReason.NO_SIGNAL)
                continue
            for version, tokens in record.meta.tokens_by_version.items():
                lag[step - version] += tokens
            self._book.used(record, step)
        self._book.advance()
        self.last_commit = (step, incarnation)
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

    def _form(self, step: int, extra: int, stopping: bool) -> Blocked | None:
        settings = self._book.settings
        self._drop_stale(step)
        overtakes: Counter[int] = Counter()
        if settings.lockstep:
            records, reason = slots_of_step(self._book, step)
            partial = settings.total_tickets is not None and settings.groups_per_step * (step + 1) > settings.total_tickets
        else:
            records, overtakes, reason = self._chosen(step, extra)
            partial = len(records) < settings.groups_per_step
        if partial and settings.drop_last_batch:
            for record in records:
                self._book.drop(record, DropReason.LAST_BATCH)
            records = []
        if not records:
            return self._nothing(reason, stopping)
        self._leased, self._overtakes = records, overtakes
        for record in records:
            self._book.lease(record)
        self._add_overtakes(1)
        return None

    def _drop_stale(self, step: int) -> None:
        """Second line of the bound, after a restore, a shard's death, or an order that is not that of admission."""
        for record in self._book.older_than(step - self._book.settings.max_staleness):
            self._book.lapse(record)

    def _nothing(self, reason: str, stopping: bool) -> Blocked:
        if not reason:
            return Blocked(reason="the prompts are used up", ended=True)
        if stopping:
            return Blocked(reason=f"the queue was stopped; {reason}", ended=True)
        return Blocked(reason=reason)

    def _chosen(self, step: int, extra: int) -> tuple[list[GroupRecord], Counter[int], str]:
        book, groups = self._book, self._book.settings.groups_per_step
        queued = book.count(GroupState.QUEUED)
        rest = book.exhausted and queued == book.num_live
        if queued < groups and not rest:
            return [], Counter(), self._waiting_for(step, queued)
        if book.selection is not None:
            return self._drawn(step, min(queued, groups + extra))
        chosen, overtakes = choose(book.live(), groups + extra, book.settings.window)
        if len(chosen) >= groups or rest:
            return chosen, overtakes, ""
        return [], Counter(), self._waiting_for(step, len(chosen))

    def _drawn(self, step: int, number: int) -> tuple[list[GroupRecord], Counter[int], str]:
        assert self._book.selection is not None
        if self._book.limiter is not None:
            while number > self._book.settings.groups_per_step and not self._may_sample(number):
                number -= 1
            refusal = self._book.limiter.sample_refusal(self._book.inserted, self._book.sampled, number)
            if refusal and not self._book.exhausted:
                return [], Counter(), f"step {step}: {refusal}"
        found = [self._book.get(ticket) for ticket in self._book.selection.sample(number, step)]
        return [record for record in found if record is not None], Counter(), ""

    def _may_sample(self, number: int) -> bool:
        limiter = self._book.limiter
        return limiter is None or limiter.may_sample(self._book.inserted, self._book.sampled, number)

    def _waiting_for(self, step: int, ready: int) -> str:
        book = self._book
        unfinished = next((r for r in book.live() if not r.finished), None)
        waiting = f"{book.num_live} groups are live"
        if unfinished is not None:
            waiting = f"ticket {unfinished.ticket}, attempt {unfinished.attempt}, is {unfinished.state.value} at {unfinished.producer}"
        return f"step {step} has {ready} of {book.settings.groups_per_step} groups that may be leased; {waiting}"

    def _give_back(self) -> None:
        self._add_overtakes(-1)
        for record in self._leased:
            self._book.unlease(record)
        self._leased, self._overtakes = [], Counter()

    def _add_overtakes(self, sign: int) -> None:
        for ticket, number in self._overtakes.items():
            record = self._book.get(ticket)
            if record is not None:
                self._book.overtake(record, sign * number)
