"""The start of a broker: what an earlier process left is taken over, or taken back to the checkpoint that the run starts from.

    nothing on disk                  a fresh gate at the checkpoint's frontier
    ledger of this very start        the gate as it was: the broker died and the learner goes on
    ledger of an earlier start       that gate, taken back to the frontier of the checkpoint

A disk that is full stops no start: everybody is held back until there is room.

Source: design note, section 4.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import QueueError, SchemaError
from asyncrl.queue.durable.disk import says_full
from asyncrl.queue.durable.ledger_file import LedgerFile
from asyncrl.queue.durable.recovery import recover
from asyncrl.queue.durable.rows import GroupRow, Snapshot
from asyncrl.queue.durable.segments import SegmentLog
from asyncrl.queue.gate import Gate
from asyncrl.queue.journal import Journal, record_of
from asyncrl.queue.ledger import EMPTY, split_frontier
from asyncrl.queue.messages import Frontier
from asyncrl.queue.records import GateState
from asyncrl.queue.restore import restored
from asyncrl.queue.settings import GateSettings
from asyncrl.queue.shm import SegmentKeeper
from asyncrl.queue.store import Payload, PayloadStore

__all__ = ["Opened", "open_queue", "reopened", "take_back", "when_there_is_room"]

log = logging.getLogger(__name__)
SEGMENT_BYTES = 64 << 20
SPARE_PARTS = 4
"""Of the log, one in so many bytes may be in files that wait to be written anew."""
RETRY_S = 1.0
SAY_EVERY_S = 10.0


@dataclass(slots=True, kw_only=True)
class Opened:
    """What a broker works with."""

    gate: Gate
    store: PayloadStore
    journal: Journal


def open_queue(run_dir: RunDir, config: Config, facts: RunFacts, settings: GateSettings, frontier: Frontier | None) -> Opened:
    """Gate, payload and ledger of a shard; ``frontier`` is that of the checkpoint, of the whole queue.

    Raises:
        DataError: what lies in the run directory is damaged or of another run. QueueError: another process serves it.
        DiskFull, OSError: something could not be written; nothing is held open, and the next call begins anew.
    """
    own = split_frontier(frontier or EMPTY, settings.shard, settings.shards)
    max_log_bytes = config.queue.max_log_mib << 20
    if config.queue.durability == "memory":
        store = PayloadStore(facts.run_id, None)
        journal = Journal(store, None, synced=False, max_log_bytes=max_log_bytes)
        return Opened(gate=Gate(settings, own, facts.incarnation), store=store, journal=journal)
    synced, folder = config.queue.durability == "synced", run_dir.queue / f"shard-{settings.shard}"
    with contextlib.ExitStack() as undo:
        segments = SegmentLog(
            folder / "log", facts.run_id, settings.shard, segment_bytes=SEGMENT_BYTES, spare_bytes=max_log_bytes // SPARE_PARTS
        )
        undo.callback(segments.close)
        ledger = LedgerFile(folder / "ledger.sqlite", facts.run_id, settings.shard, settings.shards, synced=synced)
        undo.callback(ledger.close)
        snapshot = _taken_over(segments, ledger, facts.run_id)
        store = PayloadStore(facts.run_id, segments)
        journal = Journal(store, ledger, synced=synced, max_log_bytes=max_log_bytes)
        gate = reopened(snapshot, store, journal, settings, own, facts.incarnation, time.monotonic())
        journal.commit(gate, facts.incarnation)
        undo.pop_all()
    return Opened(gate=gate, store=store, journal=journal)


def when_there_is_room(opening: Callable[[], Opened]) -> Opened:
    """What ``opening`` gives, tried anew for as long as a full disk refuses it; the clients wait meanwhile."""
    held, said_s = False, -math.inf
    while True:
        try:
            opened = opening()
        except OSError as error:
            if not says_full(error):
                raise
            if time.monotonic() - said_s >= SAY_EVERY_S:
                said_s = time.monotonic()
                log.error("every client is held back until the queue can be opened: %s", error)
            held = True
            time.sleep(RETRY_S)
            continue
        if held:
            log.info("the queue could be opened")
        return opened


def _taken_over(segments: SegmentLog, ledger: LedgerFile, run_id: str) -> Snapshot | None:
    """What an earlier process left, usable; what was not is said, also when the ledger then cannot be written."""
    try:
        found = recover(segments, ledger, _problem(run_id), _without)
    finally:
        for line in segments.report:
            log.warning("recovery: %s", line)
    for damaged in found.damaged:
        log.warning("recovery: ticket %d, attempt %d: %s", damaged.ticket, damaged.attempt, damaged.reason)
    return found.snapshot


def reopened(
    snapshot: Snapshot | None,
    store: PayloadStore,
    journal: Journal,
    settings: GateSettings,
    frontier: Frontier,
    incarnation: int,
    now_s: float,
) -> Gate:
    """The gate of a ledger's snapshot, with payload and settled groups told to ``store`` and ``journal``, which are new."""
    if snapshot is None or not snapshot.state:
        return Gate(settings, frontier, incarnation)
    for row in (*snapshot.live, *snapshot.kept):
        if row.has_payload:
            store.restore(row.ticket, _payload(row))
    for row in (*snapshot.kept, *snapshot.bare):
        journal.recall(row)
    state = msgspec.msgpack.decode(snapshot.state, type=GateState)
    gate = Gate.recovered(settings, state, [record_of(row, now_s) for row in snapshot.live], incarnation, now_s)
    if state.incarnation >= incarnation:
        log.info("recovered: %d groups live at step %d", len(snapshot.live), state.frontier.steps)
        return gate
    return take_back(gate, store, journal, frontier, incarnation, now_s)


def take_back(gate: Gate, store: PayloadStore, journal: Journal, frontier: Frontier, incarnation: int, now_s: float) -> Gate:
    """The queue at the frontier of a checkpoint, as a new branch; see :mod:`asyncrl.queue.restore`."""
    reasons = {record.ticket: journal.reason_of(record.ticket) for record in journal.records()}
    fresh, given_up = restored(gate, frontier, journal.records(), store.__contains__, incarnation, now_s)
    waiting = fresh.status().queued_groups
    journal.begin_branch(fresh, frontier.steps, [(record, reasons.get(record.ticket, "abandoned")) for record in given_up])
    log.info("restored to step %d: %d finished groups wait again, %d are given up", frontier.steps, waiting, len(given_up))
    return fresh


def _without(state: bytes, reissued: int) -> bytes:
    """Queued groups that are issued again are inserted no more: what takes their place will be, in turn."""
    gate = msgspec.msgpack.decode(state, type=GateState)
    return msgspec.msgpack.encode(msgspec.structs.replace(gate, inserted=gate.inserted - reissued))


def _payload(row: GroupRow) -> Payload:
    return Payload(checksum=row.checksum, lengths=row.lengths, segment=row.segment, place=row.place)


def _problem(run_id: str) -> Callable[[GroupRow], str]:
    keeper = SegmentKeeper(run_id)

    def problem(row: GroupRow) -> str:
        try:
            keeper.check(row.segment, sum(row.lengths))
        except (QueueError, SchemaError) as error:
            return str(error)
        return ""

    return problem
