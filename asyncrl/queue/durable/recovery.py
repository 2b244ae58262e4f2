"""The start of a broker over what an earlier process left: every group that the ledger names is usable, or is issued again.

    ledger rows ──► claims ──► the log checks them ──► damaged queued groups: attempt + 1, state reissue
                                                   ├─► damaged leased groups: leased as before, without payload
                                                   └─► damaged kept groups: settled as before, without payload
    bytes that no row claims are cut and removed, and said

Nothing is dropped in silence: what changed is written to the ledger before the caller sees it, and each damage is returned.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from asyncrl.errors import DataError
from asyncrl.queue.durable.ledger_file import LedgerFile
from asyncrl.queue.durable.place import Claim, Damaged
from asyncrl.queue.durable.rows import Changes, GroupRow, Snapshot
from asyncrl.queue.durable.segments import SegmentLog

__all__ = ["Recovered", "recover"]

FINISHED = ("queued", "leased")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a start found.

    Attributes:
        snapshot: the ledger's, with damaged groups issued again; None for a fresh queue.
        damaged: (ticket, attempt, reason) of payload that cannot be used; report: what was cut and removed.
    """

    snapshot: Snapshot | None
    damaged: tuple[Damaged, ...]
    report: tuple[str, ...]


def recover(
    log: SegmentLog,
    ledger: LedgerFile,
    problem: Callable[[GroupRow], str] = lambda row: "",
    without: Callable[[bytes, int], bytes] = lambda state, reissued: state,
) -> Recovered:
    """Brings log and ledger to one state.

    Args:
        problem: why the payload of a row that lies outside the log (``row.segment``) cannot be used, or ``""``.
        without: the ledger's state once so many queued groups are issued again.

    Raises:
        DataError: the ledger is damaged, or gone while the log is there. DiskFull: what changed cannot be written; the next call
            finds the same damage.
    """
    if ledger.created and log.num_segments:
        ledger.discard()  # or the next start would take it for the ledger of an empty queue
        raise DataError(
            f"{ledger.path} is missing beside {log.num_segments} segments in {log.folder}, so nobody knows which groups are in them: "
            "bring it back, or move the folder away to start from the checkpoint's frontier with no group queued"
        )
    snapshot = ledger.load()
    if snapshot is None:
        return Recovered(snapshot=None, damaged=tuple(log.adopt(())), report=tuple(log.report))
    damaged = log.adopt(_claims(snapshot.live), _claims(snapshot.kept))
    damaged += [Damaged(row.ticket, row.attempt, reason) for row in snapshot.live if (reason := _unclaimed(row, problem))]
    damaged += [Damaged(row.ticket, row.attempt, reason) for row in snapshot.kept if row.segment and (reason := problem(row))]
    reasons = {entry.ticket: entry.reason for entry in damaged}
    reissued = sum(row.state == "queued" and row.ticket in reasons for row in snapshot.live)
    live, kept = _repaired(snapshot.live, reasons), _repaired(snapshot.kept, reasons)
    changed = tuple(row for row in (*live, *kept) if row.ticket in reasons)
    state = without(snapshot.state, reissued) if reissued and snapshot.state else snapshot.state
    if changed:
        ledger.write(Changes(groups=changed, state=state))
    bare = (*snapshot.bare, *(row for row in kept if not row.has_payload))
    kept = tuple(row for row in kept if row.has_payload)
    snapshot = msgspec.structs.replace(snapshot, live=live, kept=kept, bare=bare, state=state)
    return Recovered(snapshot=snapshot, damaged=tuple(damaged), report=tuple(log.report))


def _claims(rows: tuple[GroupRow, ...]) -> list[Claim]:
    return [(row.place, row.ticket, row.attempt, row.checksum) for row in rows if row.place is not None]


def _unclaimed(row: GroupRow, problem: Callable[[GroupRow], str]) -> str:
    """Why a finished group whose payload is not in the log cannot be used."""
    if row.state not in FINISHED or row.place is not None:
        return ""
    if not row.segment:
        return "its payload's row in the ledger is damaged or was never written"
    return problem(row)


def _repaired(rows: tuple[GroupRow, ...], reasons: dict[int, str]) -> tuple[GroupRow, ...]:
    return tuple(_repair(row, reasons[row.ticket]) if row.ticket in reasons else row for row in rows)


def _repair(row: GroupRow, reason: str) -> GroupRow:
    if row.settled:
        return row.without_payload()
    if row.state == "leased":  # the learner may hold it already: its commit settles it, its complaint has it issued again
        return row.without_payload(meta=row.meta)
    reasons = (*row.reasons, f"attempt {row.attempt} at {row.producer}: {reason}")
    return row.without_payload(state="reissue", attempt=row.attempt + 1, reasons=reasons)
