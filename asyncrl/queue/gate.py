r"""The gate: the pure state machine that admits, leases and settles groups. No sockets, no payload; the clock is passed in.

It consumes requests of producers (issue, finish, fail, heartbeat), of the learner (lease, commit, return), of the
supervisor (producer_gone, stop) and time (expire); it produces tickets, leases and counts. Who waits on whom:

    producers wait for an index to be allowed  → unblocked by a newer version, that is by commits and publishes
    the learner waits for G groups             → unblocked by finish; a lost group by expire, producer_gone or fail

Symbols. G groups a step, S = max_staleness, w = window, k steps between publishes, c committed steps, p the version
that a producer has committed. The admission index of a new group is i = G c + (live groups ahead of it).

Invariant (bound). Every group g that was issued at index i to version p is trained in a step t with t <= p + S.
    A ticket is issued only if (i + w - 1) // G <= p + S. Each step consumes G slots, so the slots consumed before g
    are: G c at its issue, then those of groups live ahead of it (at most i - G c; a drop only lowers that), then
    those of groups that overtake it (at most w - 1: ``window.choose`` leases nothing past a group overtaken w - 1 times).
    So g gets slot j <= i + w - 1, and t = j // G <= (i + w - 1) // G <= p + S. No token of g is older than p, since
    ``finish`` refuses it. A reissue keeps its place, so its bound is unchanged, and goes to a version no older.

Liveness. If producers act and each publish reaches them, every step is reached when S >= k - 1 + ceil((w - 1) / G).
    At step c some p >= c - (k - 1) is published. The last group that the step needs has at most G - 1 live ahead:
    i <= G c + G - 1, so (i + w - 1) // G <= c + ceil((w - 1) / G) <= p + S, and it is issued; credit is never asked
    for those groups. An unfinished group is finished, or fails (expiry, death) and is issued again to a version that
    producers reach, at most ``max_attempts`` times, then dropped, and the next ticket takes its place. At most
    ``no_signal_budget_groups`` groups a step are replaced; further ones keep their slots. So G slots fill.

With max_uses U > 1 (and w = 1) i counts the uses that live groups have left, a group is first trained at step i // G at the
latest, or at c if fewer than G groups live ahead of it, and then in each of the U - 1 steps that follow, since fewer than
G are ahead of it from then on. Liveness takes U - 1 versions more.

Other orders than ``fifo`` do not keep the bound by construction: groups with a token older than S are dropped as ``stale``
before each lease (or, once used, settled as trained). The same second line holds after a restore and after the death of a shard.

Shards. A shard is a gate over the tickets that are its number modulo their count, and G is its share of each step: the proof is
the same. Groups beyond the share (``extra``) only bring the others forward.

Conservation. admitted = trained + sum(dropped) + in_flight after every call (:class:`asyncrl.queue.ledger.Ledger`).

Source: design note, section 4; faults B31, B33, B34, B49, B63.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from asyncrl.errors import ProcessDied, QueueError, VersionError
from asyncrl.queue.acceptance import Acceptance
from asyncrl.queue.admission import Admission
from asyncrl.queue.book import Book
from asyncrl.queue.counts import status_of
from asyncrl.queue.fleet import Fleet
from asyncrl.queue.leasing import Leasing
from asyncrl.queue.lockstep import stranded
from asyncrl.queue.messages import Frontier, QueueStatus
from asyncrl.queue.records import Blocked, GateState, GroupRecord, Issue, LeaseGranted, Settled
from asyncrl.queue.replay import new_selection
from asyncrl.queue.selection import MAX_PRIORITY
from asyncrl.queue.settings import GateSettings
from asyncrl.trajectory import GroupMeta

__all__ = ["Gate"]


class Gate:
    """Admission, leases and counts of one run.

    Args:
        settings: refused at construction if they cannot live.
        frontier: what the checkpoint says is settled; None for a fresh run.
        incarnation: of this start; payload of an earlier one is refused.

    Example:
        >>> gate = Gate(GateSettings.from_config(Config(), None))                          # doctest: +SKIP
        >>> gate.hello("generator-0", now_s=0.0)                                           # doctest: +SKIP
        >>> gate.issue("generator-0", version=0, now_s=0.0)                                # doctest: +SKIP
        Issue(ticket=0, attempt=0, not_before_version=0, exact_version=-1)
    """

    def __init__(self, settings: GateSettings, frontier: Frontier | None = None, incarnation: int = 0) -> None:
        self.settings = settings
        self.fleet = Fleet()
        self._book = Book(settings, frontier, new_selection(settings), settings.new_limiter())
        self._admission = Admission(self._book)
        self._leasing = Leasing(self._book, incarnation)
        self._acceptance = Acceptance(self._book, incarnation)
        self._blocked_producer, self._blocked_learner = "", ""

    @classmethod
    def recovered(cls, settings: GateSettings, state: GateState, live: Iterable[GroupRecord], incarnation: int, now_s: float) -> Gate:
        """The gate as it was when its process died; deadlines of ``live`` groups start anew.

        Producers have ``dead_after_s`` to say hello again, or their tickets are issued again.
        """
        gate = cls(settings, state.frontier, incarnation)
        book, leasing = gate._book, gate._leasing
        book.requeued = dict.fromkeys(state.requeued)
        for record in sorted(live, key=lambda record: (record.ticket not in book.requeued, record.ticket)):
            book.ledger.readmit(record.ticket)
            record.deadline_s = now_s + settings.ticket_deadline_s
            book.insert(record)
        book.ledger.skip_to(state.next_ticket)
        book.first_version, book.reissued, book.replaced_this_step = state.first_version, state.reissued, state.replaced_this_step
        book.attempts = dict(state.attempts)
        book.inserted, book.sampled = state.inserted, state.sampled
        book.stopping = state.stopping and state.incarnation >= incarnation
        leasing.incarnation = max(incarnation, state.incarnation)
        leasing.last_commit, leasing.lag_consumed = state.last_commit, state.lag_consumed
        leasing.take_up(state.lease, state.overtakes)
        gate._acceptance.rewards_sum, gate._acceptance.rewards_count = state.rewards
        gate.fleet.recall(state.producers, now_s)
        book.take_changed()
        return gate

    def state(self) -> GateState:
        """What :meth:`recovered` needs beside the live groups."""
        book, leasing, acceptance = self._book, self._leasing, self._acceptance
        lease, overtakes = leasing.lease_out
        return GateState(
            frontier=book.ledger.frontier(),
            next_ticket=book.ledger.next_ticket,
            first_version=book.first_version,
            reissued=book.reissued,
            replaced_this_step=book.replaced_this_step,
            incarnation=leasing.incarnation,
            last_commit=leasing.last_commit,
            lease=lease,
            overtakes=overtakes,
            lag_consumed=leasing.lag_consumed,
            rewards=(acceptance.rewards_sum, acceptance.rewards_count),
            producers=self.fleet.remembered(),
            inserted=book.inserted,
            sampled=book.sampled,
            attempts=dict(book.attempts),
            stopping=book.stopping,
            requeued=tuple(book.requeued),
        )

    # producers

    def hello(self, producer: str, now_s: float) -> None:
        """A producer starts, or starts again: tickets of its former life are issued again."""
        self.producer_gone(producer, now_s, "it was started again")
        self.fleet.hello(producer, now_s)

    def hello_again(self, producer: str, holds: Iterable[tuple[int, int]], now_s: float) -> bool:
        """The same process speaks on; tickets issued to it that it does not hold never came. False if it is not known."""
        if not self.fleet.again(producer, now_s):
            return False
        held = set(holds)
        for record in self._book.held_by(producer):
            if (record.ticket, record.attempt) not in held:
                self._book.fail(record, "the ticket did not come to its producer")
        return True

    def heartbeat(self, producer: str, version: int, in_flight: dict[int, int], sampled_tokens: int, now_s: float) -> None:
        """A producer is alive. Raises VersionError if its version fell or is above the committed steps."""
        self.fleet.report_version(producer, version, self._learner_step)
        self.fleet.report(producer, in_flight, sampled_tokens)
        self.fleet.seen(producer, now_s)

    def issue(self, producer: str, version: int, now_s: float) -> Issue | Blocked:
        """A ticket for a producer that has committed ``version``, or why not.

        Raises:
            VersionError: the version fell, or is above the committed steps.
        """
        self.fleet.says(producer, version, self._learner_step)
        if self._book.stopping:
            return Blocked(reason="the queue was stopped", ended=True)
        answer = self._admission.issue(producer, min(version, self._book.ledger.steps), now_s)
        self._blocked_producer = f"{producer}: {answer.reason}" if isinstance(answer, Blocked) else ""
        return answer

    def expects(self, producer: str, ticket: int, attempt: int) -> bool:
        """Whether this very attempt is being sampled there, so that its payload is worth keeping."""
        return self._acceptance.expects(producer, ticket, attempt)

    def finish(self, producer: str, meta: GroupMeta, now_s: float) -> str:
        """A finished group: ``accepted``, ``duplicate``, ``late``, ``no_signal`` or ``stale``. Idempotent by (ticket, attempt).

        Raises:
            VersionError: a token older than the ticket allows, or of a version not committed; the attempt has failed.
            QueueError: a ticket that was never issued, or issued to another producer.
        """
        return self._acceptance.finish(producer, meta, now_s)

    def fail(self, producer: str, ticket: int, attempt: int, reason: str, final: bool = False) -> None:
        """An attempt failed at its producer; ``final`` drops the group as unusable. A failure told late changes nothing.

        Raises:
            QueueError: a ticket that was never issued, or issued to another producer.
        """
        self.fleet.trouble(producer, reason)
        self._acceptance.fail(producer, ticket, attempt, reason, final)

    # supervision and time

    def producer_gone(self, producer: str, now_s: float, reason: str = "the process is gone") -> int:
        """A producer died: the tickets that it was sampling are issued again; returns how many."""
        if not self.fleet.gone(producer, reason):
            return 0
        held = self._book.held_by(producer)
        for record in held:
            self._book.fail(record, reason)
        return len(held)

    def lose(self, tickets: Iterable[int], reason: str) -> int:
        """Payload of these groups is gone: those that wait to be leased are issued again; returns how many."""
        return sum(self._acceptance.lost(ticket, reason) for ticket in tickets)

    def expire(self, now_s: float) -> list[str]:
        """Ends attempts past their deadline and producers that fell silent; says what was ended."""
        said = []
        for name in self.fleet.silent(now_s, self.settings.dead_after_s):
            reason = f"silent for queue.dead_after_s = {self.settings.dead_after_s:g} s"
            said.append(f"producer {name} is taken for dead: {reason}; {self.producer_gone(name, now_s, reason)} tickets are issued again")
        for record in self._book.overdue(now_s):
            reason = f"not finished within queue.ticket_deadline_s = {self.settings.ticket_deadline_s:g} s"
            said.append(f"ticket {record.ticket}, attempt {record.attempt}, at {record.producer}: {reason}")
            self._book.fail(record, reason)
        return said

    def postpone(self, seconds: float, *, unheard: bool) -> None:
        """The queue itself held its clients back for so long: it counts for no deadline, and ``unheard`` for no silence either."""
        self._book.postpone(seconds)
        if unheard:
            self.fleet.postpone(seconds)

    def hold(self, reason: str) -> None:
        """No ticket is given while there is a reason; an empty one lets them go again."""
        if bool(reason) != bool(self._admission.hold):
            self._book.epoch += 1
        self._admission.hold = reason

    def stop(self) -> None:
        """No ticket is issued from now on; a lease that cannot be filled says that no more will come."""
        self._book.stopping = True
        self._book.epoch += 1

    def go_on(self) -> None:
        """A stop that an earlier start was told is over."""
        self._book.stopping = False
        self._book.epoch += 1

    # the learner

    def fence(self, incarnation: int) -> None:
        """A learner of ``incarnation`` is there. Raises FencedError if a newer one was."""
        self._leasing.fence(incarnation)

    def lease(self, step: int, incarnation: int, now_s: float, extra: int = 0) -> LeaseGranted | Blocked:
        """The batch of ``step``, or why not yet; ``ended`` when none will come any more. Up to ``extra`` groups fill others' places.

        Raises:
            FencedError: an older incarnation. QueueError: another step than the next one.
            ProcessDied: every producer is dead for longer than a restart takes.
            VersionError: in lockstep, nobody has the version that a ticket needs any more.
        """
        answer = self._leasing.lease(step, incarnation, extra, self._book.stopping)
        if isinstance(answer, LeaseGranted) or answer.ended:
            self._blocked_learner = ""
            return answer
        self._check_hope(now_s)
        obituary = self.fleet.obituary()
        self._blocked_learner = f"{answer.reason}; {obituary}" if obituary else answer.reason
        return Blocked(reason=self._blocked_learner)

    def commit(self, step: int, incarnation: int, priorities: dict[int, float] | None = None) -> None:
        """The leased batch of ``step`` is in the weights; the same commit again changes nothing.

        Raises:
            FencedError: an older incarnation. QueueError: no such lease, or a priority that is none; nothing is committed.
        """
        for ticket, priority in (priorities or {}).items():
            if not 0.0 <= priority <= MAX_PRIORITY:
                raise QueueError(f"a priority is from 0 to {MAX_PRIORITY:g}; met {priority} for ticket {ticket}: scale it", ticket=ticket)
        self._leasing.commit(step, incarnation)
        for ticket, priority in (priorities or {}).items():
            self._book.prioritise(ticket, priority)

    def return_(self, step: int, incarnation: int, damaged: Sequence[tuple[int, int, str]] = ()) -> None:
        """The batch of ``step`` comes back untrained; groups whose payload is ``damaged`` are sampled again."""
        self._leasing.return_(step, incarnation)
        for ticket, attempt, reason in damaged:
            self._acceptance.damaged(ticket, attempt, reason)

    # counts

    def take_settled(self) -> list[Settled]:
        """Groups trained or dropped since the last call; their payload can go, dead letters are to be written."""
        return self._book.take_settled()

    def take_changed(self) -> list[GroupRecord]:
        """Live groups that changed since the last call."""
        return self._book.take_changed()

    @property
    def epoch(self) -> int:
        """Rises whenever a ticket that was refused may now be given."""
        return self._book.epoch

    def abandon(self, groups: int) -> None:
        """So many finished groups were given up by a restore; their tickets are live once more."""
        self._book.ledger.abandon(groups)

    def live(self) -> Iterator[GroupRecord]:
        """Live groups in admission order."""
        return self._book.live()

    def frontier(self) -> Frontier:
        """What a checkpoint keeps."""
        return self._book.ledger.frontier()

    def status(self, now_s: float = 0.0, refused: dict[str, int] | None = None, log_bytes: int = 0) -> QueueStatus:
        """Counts of the moment; ``refused`` are those of the broker."""
        return status_of(
            self._book,
            self._leasing,
            self.fleet,
            now_s=now_s,
            rewards=(self._acceptance.rewards_sum, self._acceptance.rewards_count),
            refused=refused or {},
            blocked=self._blocked(),
            log_bytes=log_bytes,
        )

    @property
    def _learner_step(self) -> int | None:
        """Committed steps; one shard of several may be behind, until the learner brings it forward."""
        return self._book.ledger.steps if self.settings.shards == 1 else None

    def _blocked(self) -> str:
        parts = []
        if self._blocked_learner:
            parts.append(f"the learner waits: {self._blocked_learner}")
        if self._blocked_producer:
            parts.append(f"generators wait: {self._blocked_producer}")
        return "; ".join(parts)

    def _check_hope(self, now_s: float) -> None:
        empty_s = self.fleet.empty_for_s(now_s)
        if empty_s > self.settings.restart_s:
            raise ProcessDied(
                f"{self.fleet.obituary()}; none has come back within generator.start_timeout_s = {self.settings.restart_s:g} s"
            )
        if self.settings.lockstep:
            problem = stranded(self._book, self.fleet.versions().values())
            if problem:
                raise VersionError(problem)
