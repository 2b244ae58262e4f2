"""A queue seen from outside: groups, steps and payload of a run directory, whether its brokers live or not.

Consumes the ledgers and logs in ``RUN/queue/shard-*``, read-only; produces rows for people and for JSON. Waits for nothing,
locks nothing: a broker goes on as if nobody looked.

Source: design note, section 4, "Inspection".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import AsyncRLError, DataError
from asyncrl.queue.durable.ledger_view import LedgerView
from asyncrl.queue.durable.rows import GroupRow
from asyncrl.queue.durable.segment_file import SegmentFile
from asyncrl.queue.records import GateState
from asyncrl.queue.shm import Mappings
from asyncrl.trajectory import decode_group

__all__ = ["LIVE", "GroupLine", "ShardFiles", "describe", "group_lines", "open_shards"]

LIVE = ("generating", "reissue", "queued", "leased")


class ShardFiles:
    """Ledger and log of one shard, read-only.

    Raises:
        DataError: no ledger, or one that is damaged or of another schema version.
    """

    def __init__(self, folder: Path) -> None:
        self.view = LedgerView.open(folder / "ledger.sqlite")
        self.shard, self.shards, self.run_id = self.view.facts.shard, self.view.facts.num_shards, self.view.facts.run_id
        self._log = folder / "log"
        self._mappings = Mappings(self.run_id)

    @contextlib.contextmanager
    def moment(self) -> Iterator[LedgerView]:
        """The ledger as of one transaction, however long the reader takes."""
        self.view.read("BEGIN")
        try:
            yield self.view
        finally:
            self.view.read("COMMIT")

    def state(self) -> GateState | None:
        """What the gate knows beside its groups; None before the first commit."""
        raw = self.view.state()
        try:
            return msgspec.msgpack.decode(raw, type=GateState) if raw else None
        except msgspec.DecodeError as error:
            raise DataError(
                f"{self.view.path} holds the state of another version of asyncrl ({error}): use the one that wrote it"
            ) from error

    def payload(self, row: GroupRow) -> memoryview:
        """The payload of a group, unchecked.

        Raises:
            AsyncRLError: it is not there.
        """
        if row.place is not None:
            return self.segment(row.place.segment).view(row.place)
        if row.segment:
            return self._mappings.view(row.segment, sum(row.lengths))
        raise DataError(f"no payload of ticket {row.ticket} is kept: it is {row.state}", ticket=row.ticket)

    def segment(self, number: int) -> SegmentFile:
        """One file of the log."""
        return SegmentFile.open(self._log, number)

    def close(self) -> None:
        """Frees files."""
        self.view.close()
        self._mappings.close()


class GroupLine(msgspec.Struct, frozen=True, kw_only=True):
    """One group of ``asyncrl queue ls``.

    ``versions``: of its tokens, or of the producer that samples it; ``lag``: committed steps minus the oldest of them.
    ``num_bytes`` of its payload; ``age_s`` since its last trajectory was finished, -1 if that is not known.
    """

    ticket: int
    state: str
    attempt: int
    producer: str
    versions: tuple[int, ...]
    lag: int
    num_bytes: int
    age_s: float
    reason: str


@contextlib.contextmanager
def open_shards(run: Path) -> Iterator[list[ShardFiles]]:
    """All shards of a run directory, by number.

    Raises:
        DataError: none is there, one of them is missing, or they belong to different runs.
    """
    folders = sorted(RunDir(run).queue.glob("shard-*/ledger.sqlite"))
    if not folders:
        raise DataError(f"{RunDir(run).queue} holds no ledger: {run} is no run directory, or its queue.durability is memory")
    with contextlib.ExitStack() as stack:
        shards = []
        for path in folders:
            shards.append(ShardFiles(path.parent))
            stack.callback(shards[-1].close)
        shards.sort(key=lambda files: files.shard)
        owners = [(files.run_id, files.shards, files.shard) for files in shards]
        if owners != [(shards[0].run_id, shards[0].shards, number) for number in range(shards[0].shards)]:
            raise DataError(f"{RunDir(run).queue} holds every shard of one run; met {', '.join(str(f.view.facts) for f in shards)}")
        yield shards


def group_lines(shards: list[ShardFiles], states: tuple[str, ...] = LIVE, limit: int | None = None) -> list[GroupLine]:
    """Groups in these states, in ticket order over all shards."""
    found: list[GroupLine] = []
    for files in shards:
        with files.moment() as view:
            state = files.state()
            rows = [row for name in states for row in view.rows(name, limit)]
        found.extend(_line(files, row, state.frontier.steps if state else 0) for row in rows)
    return sorted(found, key=lambda line: line.ticket)[:limit]


def describe(shards: list[ShardFiles], ticket: int) -> dict[str, Any]:
    """Everything that is known of a ticket: its row, earlier branches, and what its payload holds.

    Raises:
        DataError: the ticket is not in the ledger.
    """
    files = shards[ticket % len(shards)]
    row = files.view.row(ticket)
    earlier = [{"branch": branch, **msgspec.to_builtins(gone)} for branch, gone in files.view.abandoned() if gone.ticket == ticket]
    if row is None and not earlier:
        raise DataError(
            f"ticket {ticket} is not in {files.view.path}: it was never issued, or was settled before the oldest checkpoint", ticket=ticket
        )
    known: dict[str, Any] = {"ticket": ticket, "shard": files.shard}
    if row is not None:
        known |= msgspec.to_builtins(row, str_keys=True)
        if row.has_payload:
            known["payload"] = _contents(files, row)
    return known | {"abandoned": earlier}


def _line(files: ShardFiles, row: GroupRow, steps: int) -> GroupLine:
    versions = tuple(sorted(row.meta.tokens_by_version)) if row.meta is not None else (row.version,)
    return GroupLine(
        ticket=row.ticket,
        state=row.state,
        attempt=row.attempt,
        producer=row.producer,
        versions=versions,
        lag=steps - versions[0],
        num_bytes=sum(row.lengths),
        age_s=_age_s(files, row),
        reason=row.reason or (row.reasons[-1] if row.reasons else ""),
    )


def _age_s(files: ShardFiles, row: GroupRow) -> float:
    """Looks at one column of the payload; the others stay on the disk."""
    if not row.has_payload:
        return -1.0
    try:
        with pa.ipc.open_stream(files.payload(row)) as reader:
            return float(time.time() - max(reader.read_all().column("finished_s").to_pylist()))
    except (AsyncRLError, pa.ArrowException, OSError, KeyError, ValueError, TypeError):
        return -1.0  # settled meanwhile, or damaged: `verify` says which


def _contents(files: ShardFiles, row: GroupRow) -> dict[str, Any]:
    try:
        return {"problem": "", "trajectories": _trajectories(files.payload(row))}
    except AsyncRLError as error:
        return {"problem": str(error), "trajectories": []}


def _trajectories(payload: memoryview) -> list[dict[str, Any]]:
    return [
        {
            "sibling": t.sibling,
            "sample": t.sample,
            "tokens": len(t),
            "prompt": t.prompt_length,
            "sampled": t.num_sampled_tokens,
            "reward": t.reward,
            "versions": sorted({span.version for span in t.version_spans}),
            "finish_reason": t.finish_reason,
            "seconds": round(t.finished_s - t.dispatched_s, 3),
            "generator": t.generator,
        }
        for t in decode_group(payload).trajectories
    ]
