"""What becomes of a group that a producer says it has finished, or failed.

Idempotent by (ticket, attempt). A group whose versions break the bound fails its attempt, so that the ticket is issued
again instead of waiting for its deadline.

Source: design note, section 4; faults B31, B34.
"""

from __future__ import annotations

from asyncrl.errors import QueueError, VersionError
from asyncrl.queue.book import Book
from asyncrl.queue.messages import DropReason
from asyncrl.queue.records import GroupRecord, GroupState
from asyncrl.trajectory import GroupMeta

__all__ = ["Acceptance"]


class Acceptance:
    """Checks and books finished and failed attempts.

    Attributes:
        rewards_sum, rewards_count: over all trajectories of all groups that finished, those without signal included.
    """

    def __init__(self, book: Book, incarnation: int) -> None:
        self._book = book
        self._incarnation = incarnation
        self.rewards_sum, self.rewards_count = 0.0, 0

    def finish(self, producer: str, meta: GroupMeta, now_s: float) -> str:
        """See :meth:`asyncrl.queue.gate.Gate.finish`."""
        record = self._book.get(meta.ticket)
        if record is None:
            self._check_issued(meta.ticket)
            return "duplicate" if self._book.accepted_attempt(meta.ticket) == meta.attempt else "late"
        if meta.attempt < record.attempt:
            return "late"
        if meta.attempt == record.attempt and record.state in (GroupState.QUEUED, GroupState.LEASED):
            return "duplicate"
        self._check_holder(record, producer, meta.attempt)
        problem = self._version_problem(record, meta)
        if problem:
            self._book.fail(record, problem)
            raise VersionError(problem, ticket=meta.ticket, group_id=meta.group_id)
        return self._accept(record, meta, now_s)

    def expects(self, producer: str, ticket: int, attempt: int) -> bool:
        """Whether this very attempt is being sampled there, so that its payload is worth keeping."""
        record = self._book.get(ticket)
        return record is not None and record.state is GroupState.GENERATING and (record.producer, record.attempt) == (producer, attempt)

    def damaged(self, ticket: int, attempt: int, reason: str) -> None:
        """Payload of a finished group cannot be used: another attempt is made."""
        record = self._book.get(ticket)
        if record is not None and record.attempt == attempt and record.finished:
            self._book.fail(record, f"payload: {reason}")

    def lost(self, ticket: int, reason: str) -> bool:
        """Payload of a group that waits is gone: another attempt is made. Of a leased one its consumer says what it met."""
        record = self._book.get(ticket)
        if record is None or record.state is not GroupState.QUEUED:
            return False
        self._book.fail(record, f"payload: {reason}")
        return True

    def fail(self, producer: str, ticket: int, attempt: int, reason: str, final: bool) -> None:
        """See :meth:`asyncrl.queue.gate.Gate.fail`."""
        record = self._book.get(ticket)
        if record is None:
            self._check_issued(ticket)
            return
        if attempt < record.attempt or record.state in (GroupState.QUEUED, GroupState.LEASED):
            return
        self._check_holder(record, producer, attempt)
        if final:
            record.reasons.append(f"attempt {attempt} at {producer}: {reason}")
            self._book.drop(record, DropReason.UNUSABLE)
        else:
            self._book.fail(record, reason)

    def _check_issued(self, ticket: int) -> None:
        if not self._book.ledger.is_settled(ticket) and ticket not in self._book.attempts:
            raise QueueError(f"a group answers a ticket that was issued; ticket {ticket} was not", ticket=ticket)

    def _check_holder(self, record: GroupRecord, producer: str, attempt: int) -> None:
        if record.state is not GroupState.GENERATING or attempt != record.attempt or producer != record.producer:
            raise QueueError(
                f"ticket {record.ticket}, attempt {record.attempt}, is {record.state.value} at {record.producer}; "
                f"met attempt {attempt} from {producer}",
                ticket=record.ticket,
            )

    def _version_problem(self, record: GroupRecord, meta: GroupMeta) -> str:
        oldest, newest, steps = meta.oldest_version, max(meta.tokens_by_version), self._book.ledger.steps
        if meta.incarnation != self._incarnation:
            return f"this start of the run is incarnation {self._incarnation}; ticket {meta.ticket} has tokens of {meta.incarnation}"
        if newest > steps and self._book.settings.shards == 1:  # one of several may be behind
            return f"{steps} steps are committed; ticket {meta.ticket} has tokens of version {newest}, which does not exist yet"
        if oldest < record.version:
            return (
                f"ticket {meta.ticket} was issued to version {record.version}, so that no token is older than max_staleness "
                f"{self._book.settings.max_staleness} when trained; met tokens of version {oldest}"
            )
        if self._book.settings.lockstep and newest != record.version:
            return f"in lockstep ticket {meta.ticket} is sampled wholly by version {record.version}; met tokens of version {newest}"
        return ""

    def _accept(self, record: GroupRecord, meta: GroupMeta, now_s: float) -> str:
        self.rewards_sum += sum(meta.rewards_N)
        self.rewards_count += len(meta.rewards_N)
        self._book.remember(meta.ticket, meta.attempt)
        replaced = self._book.replaced_this_step < self._book.settings.no_signal_budget_groups
        if self._book.settings.replace_no_signal and not meta.has_signal and replaced:
            self._book.replaced_this_step += 1
            self._book.drop(record, DropReason.NO_SIGNAL)
            return "no_signal"
        if self._book.ledger.steps - meta.oldest_version > self._book.settings.max_staleness:
            self._book.drop(record, DropReason.STALE)
            return "stale"
        self._book.accept(record, meta, now_s)
        return "accepted"
