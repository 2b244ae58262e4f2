"""Admission: which producer may sample which ticket now, or why not.

Source: design note, section 4; faults B33, B34, B49.
"""

from __future__ import annotations

from asyncrl.queue.book import Book
from asyncrl.queue.lockstep import exact_version, may_advance
from asyncrl.queue.records import Blocked, GroupRecord, GroupState, Issue

__all__ = ["Admission"]


class Admission:
    """Issues tickets by the rule ``(i + w - 1) // G <= p + S``, proven in :mod:`asyncrl.queue.gate`, or by the limiter's.

    Attributes:
        hold: why no ticket is given at present, whatever the rule says; empty while any may be.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._settings = book.settings
        self.hold = ""

    def issue(self, producer: str, version: int, now_s: float) -> Issue | Blocked:
        """A ticket for a producer that has committed ``version``: one to be issued again, else a new one, else the reason."""
        if self.hold:
            return Blocked(reason=self.hold)
        again = self._waiting_reissue(version)
        if again is not None:
            self._book.reissue(again, producer, version, now_s)
            return self._as_issue(again)
        reason = self._refusal(version)
        if reason:
            advance = self._settings.lockstep and may_advance(self._book, version)
            return Blocked(reason=reason, advance=advance)
        return self._as_issue(self._book.admit(producer, version, now_s))

    def index(self) -> int:
        """Admission index of the next new ticket: slots consumed so far plus those of the live groups ahead of it.

        In lockstep every ticket owns its slot, so its index is its number.
        """
        if self._settings.lockstep:
            return self._book.ledger.next_ticket
        return self._settings.groups_per_step * self._book.ledger.steps + self._book.slots_ahead

    def last_step(self, index: int) -> int:
        """The latest step that may train a group issued at ``index``.

        With ``max_uses`` U > 1 (and a window of 1) a group is first trained when fewer than G groups live ahead of it, and then in
        each of the next U - 1 steps.
        """
        settings = self._settings
        if settings.max_uses > 1 and self._book.num_live < settings.groups_per_step:
            return self._book.ledger.steps + settings.max_uses - 1
        return (index + settings.window - 1) // settings.groups_per_step + settings.max_uses - 1

    def _as_issue(self, record: GroupRecord) -> Issue:
        exact = record.version if self._settings.lockstep else -1
        return Issue(ticket=record.ticket, attempt=record.attempt, not_before_version=record.version, exact_version=exact)

    def _waiting_reissue(self, version: int) -> GroupRecord | None:
        for record in self._book.to_issue_again():
            if version == record.version or (version > record.version and not self._settings.lockstep):
                return record
        return None

    def _refusal(self, version: int) -> str:
        settings, index = self._settings, self.index()
        groups, staleness = settings.groups_per_step, settings.max_staleness
        if self._book.exhausted:
            return f"all {settings.total_tickets} prompts have been handed out"
        if settings.lockstep:
            first = self._book.first_version
            exact = exact_version(index, groups, staleness, first)
            if exact != version:
                return (
                    f"ticket {index} is sampled by version max({first}, {index} // {groups} - {staleness}) = {exact}; met version {version}"
                )
        return self._too_late(index, version) or self._no_credit(index)

    def _too_late(self, index: int, version: int) -> str:
        if self._book.limiter is not None:
            coming = self._book.count(GroupState.GENERATING, GroupState.REISSUE)
            return self._book.limiter.insert_refusal(self._book.inserted + coming, self._book.sampled)
        settings, last = self._settings, self.last_step(index)
        if last <= version + settings.max_staleness:
            return ""
        uses = f" + {settings.max_uses} - 1" if settings.max_uses > 1 else ""
        return (
            f"ticket {self._book.ledger.next_ticket} (index {index}) may be trained at step ({index} + {settings.window} - 1) // "
            f"{settings.groups_per_step}{uses} = {last}, and version {version} + max_staleness {settings.max_staleness} allows "
            f"{version + settings.max_staleness}: waits for version {last - settings.max_staleness}"
        )

    def _batch_needs_more(self) -> bool:
        """Whether the limiter holds the next batch back even if all that is out arrives."""
        book = self._book
        coming = book.inserted + book.count(GroupState.GENERATING, GroupState.REISSUE)
        return book.limiter is not None and not book.limiter.may_sample(coming, book.sampled, self._settings.groups_per_step)

    def _no_credit(self, index: int) -> str:
        """Back-pressure; never for a group that the next batch needs, or producer and learner would wait on each other."""
        settings, book = self._settings, self._book
        if book.num_live < settings.groups_per_step or self._batch_needs_more():
            return ""
        queued = book.count(GroupState.QUEUED)
        if queued >= settings.max_queued_groups:
            return (
                f"{queued} finished groups are queued, and queue.max_queued_groups is {settings.max_queued_groups}: waits for the learner"
            )
        # what is being sampled will be as large as the largest group so far, as far as anybody knows
        promised = book.largest_bytes * (book.count(GroupState.GENERATING) + 1)
        if book.queued_bytes + promised > settings.max_queued_bytes:
            return (
                f"{book.queued_bytes} bytes are queued and {promised} may come from tickets that are out, and queue.max_queued_mib is "
                f"{settings.max_queued_bytes >> 20}: waits for the learner"
            )
        return ""
