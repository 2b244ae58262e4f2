"""Whether a queue's files hold what they claim: every payload's checksum, and every ticket counted once.

Consumes the shards of a run directory, read-only; produces a :class:`Verdict`. On a live queue a group may be settled between
two looks, so what looks damaged is looked at again under the row as it is then.

Source: design note, section 4, "Inspection".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from asyncrl.errors import AsyncRLError, DataError
from asyncrl.queue.durable.rows import GroupRow
from asyncrl.queue.inspect import LIVE, ShardFiles
from asyncrl.queue.ledger import frontier_problem, merge_frontiers
from asyncrl.queue.messages import Frontier
from asyncrl.queue.payload import checksum
from asyncrl.queue.records import GateState

__all__ = ["Verdict", "verify"]

FINISHED = ("queued", "leased")


class Verdict(msgspec.Struct, kw_only=True):
    """What was looked at and found; ``damage`` and ``miscounts`` are sentences, empty when all is well.

    ``admitted = trained + sum(dropped) + in_flight`` over all shards.
    """

    num_payloads: int = 0
    num_bytes: int = 0
    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    in_flight: int = 0
    damage: list[str] = []
    miscounts: list[str] = []

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.damage or self.miscounts)


def verify(shards: list[ShardFiles]) -> Verdict:
    """Reads every payload that is kept, and counts every ticket."""
    verdict = Verdict()
    frontiers: list[Frontier] = []
    for files in shards:
        try:
            state, rows = _moment(files, verdict)
        except DataError as error:
            verdict.damage.append(f"shard {files.shard}: {error}")
            continue
        for row in rows:
            _check_payload(files, row, verdict)
        if state is not None:
            frontiers.append(state.frontier)
            verdict.miscounts.extend(f"shard {files.shard}: {line}" for line in _miscounts(files, state, rows))
        verdict.in_flight += sum(row.state in LIVE for row in rows)
    if len(frontiers) == len(shards):
        _count(merge_frontiers(frontiers), verdict)
    return verdict


def _moment(files: ShardFiles, verdict: Verdict) -> tuple[GateState | None, tuple[GroupRow, ...]]:
    with files.moment() as view:
        pages = [line for (line,) in view.read("PRAGMA quick_check(3)")]
        if pages != ["ok"]:
            raise DataError(f"{view.path} is damaged: {'; '.join(pages)}")
        rows = []
        for (ticket,) in view.read("SELECT ticket FROM groups ORDER BY ticket"):
            try:
                row = view.row(ticket)
            except DataError as error:  # one by one, so that a damaged row hides no other
                verdict.damage.append(f"shard {files.shard}: {error}")
                continue
            rows.extend([row] if row is not None else [])
        return files.state(), tuple(rows)


def _check_payload(files: ShardFiles, row: GroupRow, verdict: Verdict) -> None:
    if not row.has_payload and row.state not in FINISHED:
        return
    reason = _problem(files, row)
    if reason:
        now = files.view.row(row.ticket)
        if now is None or now != row:  # it moved on while we looked
            reason = _problem(files, now) if now is not None and (now.has_payload or now.state in FINISHED) else ""
    verdict.num_payloads += 1
    verdict.num_bytes += sum(row.lengths)
    if reason:
        verdict.damage.append(f"ticket {row.ticket}, attempt {row.attempt}, {row.state}: {reason}")


def _problem(files: ShardFiles, row: GroupRow) -> str:
    try:
        if row.place is not None:
            return files.segment(row.place.segment).check(row.place, row.ticket, row.attempt, row.checksum)
        found = checksum([files.payload(row)])
    except AsyncRLError as error:
        return str(error)
    return "" if found == row.checksum else f"checksum differs: xxh3-64 was {row.checksum:#018x} and is {found:#018x}"


def _miscounts(files: ShardFiles, state: GateState, rows: tuple[GroupRow, ...]) -> Iterator[str]:
    """Each ticket of the shard below the next new one is settled or live, and is not both."""
    frontier = state.frontier
    above = set(frontier.settled_above)
    live = {row.ticket for row in rows if row.state in LIVE}
    settled = {row.ticket for row in rows if row.settled}
    for name, tickets in (
        ("are live in the ledger and settled in the frontier", {t for t in live if t < frontier.low or t in above}),
        ("are settled in the ledger and not in the frontier", {t for t in settled if t >= frontier.low and t not in above}),
        ("belong to another shard", {t for t in live | settled if t % files.shards != files.shard}),
        ("were issued and are neither live nor settled", set(range(frontier.low, state.next_ticket, files.shards)) - above - live),
    ):
        if tickets:
            yield f"{len(tickets)} tickets {name}: {', '.join(map(str, sorted(tickets)[:8]))}"


def _count(frontier: Frontier, verdict: Verdict) -> None:
    verdict.trained, verdict.dropped = frontier.trained, frontier.dropped
    verdict.admitted = verdict.trained + Counter(verdict.dropped).total() + verdict.in_flight
    problem = frontier_problem(frontier)
    if problem:
        verdict.miscounts.append(problem)
