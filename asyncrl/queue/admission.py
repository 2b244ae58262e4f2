"""Admission: which producer may sample which ticket now, or why not.

Source: design note, section 4; faults B33, B34, B49.
"""

from __future__ import annotations

from asyncrl.queue.book import Book
from asyncrl.queue.lockstep import exact_version, may_advance
from asyncrl.queue.records import Blocked, GroupRecord, GroupState, Issue

__all__ = ["Admission"]


class Admission:
    """Issues tickets by the rule ``(i + w - 1) // G <= p + S``, proven in :mod:`asyncrl.queue.gate`."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._settings = book.settings

    def issue(self, producer: str, version: int, now_s: float) -> Issue | Blocked:
        """A ticket for a producer that has committed ``version``: one to be issued again, else a new one, else the reason."""
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
        """Admission index of the next new ticket: slots consumed so far plus live groups ahead of it.

        In lockstep every ticket owns its slot, so its index is its number.
        """
        if self._settings.lockstep:
            return self._book.ledger.next_ticket
        return self._settings.groups_per_step * self._book.ledger.steps + self._book.num_live

    def _as_issue(self, record: GroupRecord) -> Issue:
        exact = record.version if self._settings.lockstep else -1
        return Issue(ticket=record.ticket, attempt=record.attempt, not_before_version=record.version, exact_version=exact)

    def _waiting_reissue(self, version: int) -> GroupRecord | None:
        for record in self._book.live():
            if record.state is not GroupState.REISSUE:
                continue
            if version == record.version or (version > record.version and not self._settings.lockstep):
                return record
        return None

    def _refusal(self, version: int) -> str:
        settings, index = self._settings, self.index()
        groups, window, staleness = settings.groups_per_step, settings.window, settings.max_staleness
        if self._book.exhausted:
            return f"all {settings.total_tickets} prompts have been handed out"
        if settings.lockstep:
            first = self._book.first_version
            exact = exact_version(index, groups, staleness, first)
            if exact != version:
                return (
                    f"ticket {index} is sampled by version max({first}, {index} // {groups} - {staleness}) = {exact}; met version {version}"
                )
        last_step = (index + window - 1) // groups
        if last_step > version + staleness:
            return (
                f"ticket {self._book.ledger.next_ticket} (index {index}) may be trained at step ({index} + {window} - 1) // {groups} = "
                f"{last_step}, and version {version} + max_staleness {staleness} allows {version + staleness}: "
                f"waits for version {last_step - staleness}"
            )
        return self._no_credit(index)

    def _no_credit(self, index: int) -> str:
        """Back-pressure; never for a group that the next batch needs, or producer and learner would wait on each other."""
        settings = self._settings
        if index < settings.groups_per_step * (self._book.ledger.steps + 1):
            return ""
        queued, num_bytes = self._book.count(GroupState.QUEUED), self._book.queued_bytes()
        if queued >= settings.max_queued_groups:
            return (
                f"{queued} finished groups are queued, and queue.max_queued_groups is {settings.max_queued_groups}: waits for the learner"
            )
        if num_bytes >= settings.max_queued_bytes:
            return f"{num_bytes} bytes are queued, and queue.max_queued_mib is {settings.max_queued_bytes >> 20}: waits for the learner"
        return ""
