"""A log, a ledger and payloads by hand, for the tests of what the queue keeps on disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.queue.durable.ledger_file import LedgerFile
from asyncrl.queue.durable.place import Claim, Place
from asyncrl.queue.durable.record import payload_checksum
from asyncrl.queue.durable.rows import GroupRow
from asyncrl.queue.durable.segments import SegmentLog
from asyncrl.queue.messages import Frontier
from asyncrl.trajectory import GroupMeta

PLENTY = 1 << 40


def new_log(folder: Path, **more: Any) -> SegmentLog:
    return SegmentLog(folder / "log", "run-1", 0, **{"free_bytes": lambda _: PLENTY, "spare_segments": 0, **more})


def new_ledger(folder: Path, **more: Any) -> LedgerFile:
    return LedgerFile(folder / "ledger.sqlite", "run-1", 0, 1, **more)


def put(log: SegmentLog, ticket: int, payload: bytes, attempt: int = 0) -> Claim:
    checksum = payload_checksum(payload)
    half = len(payload) // 2
    return (log.append(ticket, attempt, [payload[:half], payload[half:]], checksum), ticket, attempt, checksum)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "log").glob("segment-*"))


def segment_path(folder: Path, place: Place) -> Path:
    return folder / "log" / f"segment-{place.segment:08d}.log"


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def meta_of(ticket: int, attempt: int = 0) -> GroupMeta:
    return GroupMeta(
        group_id=f"g{ticket}",
        ticket=ticket,
        attempt=attempt,
        incarnation=0,
        generator="generator-0",
        lengths_N=(5, 5),
        prompt_lengths_N=(2, 2),
        sampled_tokens_N=(3, 3),
        rewards_N=(0.0, 1.5),
        tokens_by_version={3: 4, 4: 2},
        payload_bytes=100,
    )


def queued(claim: Claim, state: str = "queued", step: int = -1, **more: Any) -> GroupRow:
    place, ticket, attempt, checksum = claim
    return GroupRow(
        ticket=ticket,
        attempt=attempt,
        state=state,
        producer="generator-0",
        version=3,
        step=step,
        meta=meta_of(ticket, attempt),
        checksum=checksum,
        lengths=(place.length,),
        place=place,
        **more,
    )


def frontier(steps: int, low: int, above: Iterable[int] = ()) -> Frontier:
    settled = tuple(above)
    return Frontier(steps=steps, low=low, settled_above=settled, trained=low + len(settled), dropped={})
