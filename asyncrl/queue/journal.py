"""One group commit: what a burst of requests changed goes to the ledger, in one transaction, before any reply goes out.

Consumes the gate's changes, produces rows; waits for the disk alone. Order of a commit: the log is synced (if asked), the ledger
is written, then the log may drop payload that the ledger names no more, and rows of checkpoints that are gone are deleted.

Source: design note, section 4.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from asyncrl.errors import DiskFull
from asyncrl.queue.durable.ledger_file import LedgerFile
from asyncrl.queue.durable.rows import Changes, GroupRow, StepRow
from asyncrl.queue.gate import Gate
from asyncrl.queue.records import GroupRecord, GroupState, Settled
from asyncrl.queue.store import Payload, PayloadStore

__all__ = ["Journal", "record_of", "row_of"]

REMEMBERED = 100_000


class Journal:
    """The ledger of one broker, and the settled groups that a restore may still ask for.

    Args:
        ledger: None when nothing is written (``queue.durability=memory``).
        synced: every commit waits for the disk.
        max_log_bytes: beyond it payload of settled groups goes, oldest first, whatever checkpoint may want it.
    """

    def __init__(self, store: PayloadStore, ledger: LedgerFile | None, synced: bool, max_log_bytes: int) -> None:
        self._store = store
        self._ledger = ledger
        self._synced = synced
        self._max_log_bytes = max_log_bytes
        self._settled: OrderedDict[int, tuple[GroupRecord, str]] = OrderedDict()
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._rows: list[GroupRow] = []
        self._forget: list[int] = []
        self._state = b""
        self._step = -1
        self._oldest_step = 0

    def settled(self, settled: Settled) -> None:
        """A group was settled: it is remembered until no checkpoint can ask for it."""
        record = settled.record
        trained = not settled.reason
        self._store.settle(record.ticket, retain=trained and self._ledger is not None)
        self._settled[record.ticket] = (record, settled.reason)
        self._rows.append(row_of(record, self._store.payload(record.ticket), settled.reason))
        if record.ticket in self._store:
            self._retained[record.ticket] = None
        while len(self._settled) > REMEMBERED:
            self._settled.popitem(last=False)

    def records(self) -> Iterable[GroupRecord]:
        """Settled groups that are remembered."""
        return [record for record, _ in self._settled.values()]

    def commit(self, gate: Gate, incarnation: int) -> None:
        """Makes everything up to now recoverable.

        Raises:
            DiskFull: nothing was written; what changed is kept for the next call.
        """
        changed = gate.take_changed()
        for record in changed:
            if record.meta is None:  # its payload was damaged, and is nobody's
                self._store.settle(record.ticket, retain=False)
        if self._ledger is None:
            self._rows.clear()
            return
        self._rows.extend(row_of(record, self._store.payload(record.ticket)) for record in changed)
        state = msgspec.msgpack.encode(gate.state())
        if not self._rows and state == self._state and not self._forget:
            self._delete_old(self._ledger)
            return
        if self._synced and self._store.log is not None:
            self._store.log.sync()
        self._trim()
        steps = self._steps(gate, incarnation)
        self._ledger.write(Changes(groups=tuple(self._rows), steps=steps, state=state, forget=tuple(self._forget)))
        self._rows, self._forget, self._state = [], [], state
        self._step = steps[-1].step if steps else self._step
        self._store.release_freed()
        self._delete_old(self._ledger)

    def checkpointed(self, oldest_step: int) -> None:
        """No checkpoint of fewer steps will be restored: what only such a one needs goes with the next commit."""
        for ticket in [t for t, (record, _) in self._settled.items() if record.settled_at < oldest_step]:
            del self._settled[ticket]
            self._drop_payload(ticket)
        self._oldest_step = max(self._oldest_step, oldest_step)

    def begin_branch(self, gate: Gate, steps: int, abandoned: Iterable[tuple[GroupRecord, str]]) -> None:
        """The queue went back to ``steps`` committed steps: rows beyond are given up, those that wait again are rewritten."""
        given_up = list(abandoned)
        for record, _ in given_up:
            self._drop_payload(record.ticket)
        other = {record.ticket for record in gate.live()} | {record.ticket for record, _ in given_up}
        self._settled = OrderedDict((t, kept) for t, kept in self._settled.items() if kept[0].settled_at < steps and t not in other)
        self._retained = OrderedDict((t, None) for t in self._retained if t in self._settled)
        gate.take_changed()
        if self._ledger is None:
            return
        rows = tuple(row_of(record, self._store.payload(record.ticket)) for record in gate.live())
        self._state = msgspec.msgpack.encode(gate.state())
        changes = Changes(
            groups=rows,
            state=self._state,
            abandoned=tuple(row_of(record, None, reason) for record, reason in given_up),
        )
        self._ledger.begin_branch(steps, changes)
        self._rows, self._forget, self._step = [], [], steps - 1
        self._oldest_step = min(self._oldest_step, steps)
        self._store.release_freed()

    def reason_of(self, ticket: int) -> str:
        """Why a remembered settled group was dropped; empty for a trained or an unknown one."""
        return self._settled[ticket][1] if ticket in self._settled else ""

    def recall(self, row: GroupRow) -> None:
        """A settled group that an earlier process remembered."""
        self._settled[row.ticket] = (record_of(row), row.reason)
        if row.ticket in self._store:
            self._retained[row.ticket] = None

    def close(self) -> None:
        """Frees the ledger's file."""
        if self._ledger is not None:
            self._ledger.close()

    def _steps(self, gate: Gate, incarnation: int) -> tuple[StepRow, ...]:
        frontier = gate.frontier()
        if frontier.steps - 1 == self._step or frontier.steps == 0:
            return ()
        return (StepRow(step=frontier.steps - 1, incarnation=incarnation, frontier=frontier, committed_s=time.time()),)

    def _delete_old(self, ledger: LedgerFile) -> None:
        """Deletes what only a checkpoint that is gone needs; a full disk puts it off and stops nobody."""
        if not self._oldest_step:
            return
        try:
            ledger.steps_kept_from(self._oldest_step)
        except DiskFull:
            return
        self._oldest_step = 0

    def _trim(self) -> None:
        excess = self._store.log_bytes - self._max_log_bytes  # once: files go after the ledger is written
        while self._retained and excess > 0:
            ticket, _ = self._retained.popitem(last=False)
            payload = self._store.payload(ticket)
            excess -= payload.num_bytes if payload is not None else 0
            self._drop_payload(ticket)

    def _drop_payload(self, ticket: int) -> None:
        self._retained.pop(ticket, None)
        if ticket in self._store:
            self._store.settle(ticket, retain=False)
            self._forget.append(ticket)


def row_of(record: GroupRecord, payload: Payload | None, reason: str | None = None) -> GroupRow:
    """The ledger's row of a record; ``reason`` of a settled one, empty when it was trained."""
    state = record.state.value if reason is None else ("dropped" if reason else "trained")
    return GroupRow(
        ticket=record.ticket,
        attempt=record.attempt,
        state=state,
        producer=record.producer,
        version=record.version,
        overtaken=record.overtaken,
        used_at=record.used_at,
        step=record.settled_at,
        priority=record.priority,
        reason=reason or "",
        reasons=tuple(record.reasons),
        meta=record.meta if payload is not None else None,
        checksum=payload.checksum if payload else 0,
        lengths=payload.lengths if payload else (),
        place=payload.place if payload else None,
        segment=payload.segment if payload else "",
    )


def record_of(row: GroupRow, now_s: float = 0.0) -> GroupRecord:
    """The record of a ledger's row, waiting anew from ``now_s`` on."""
    return GroupRecord(
        ticket=row.ticket,
        attempt=row.attempt,
        producer=row.producer,
        version=row.version,
        deadline_s=now_s,
        state=GroupState(row.state) if not row.settled else GroupState.QUEUED,
        overtaken=row.overtaken,
        used_at=row.used_at,
        settled_at=row.step,
        priority=row.priority,
        queued_s=now_s,
        meta=row.meta,
        reasons=list(row.reasons),
    )
