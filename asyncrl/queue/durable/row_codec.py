"""Ledger rows as bytes: what changes with each transition apart from the payload's facts, which are written once.

Each blob ends with a CRC-32 of its own, since SQLite keeps none.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec

from asyncrl.errors import DataError
from asyncrl.queue.durable.place import Place
from asyncrl.queue.durable.rows import GroupRow, StepRow
from asyncrl.trajectory import GroupMeta

__all__ = ["decode_group_row", "decode_step", "encode_group_row", "encode_payload", "encode_step", "seal", "unseal"]

T = TypeVar("T")


class _Transition(msgspec.Struct, frozen=True, array_like=True):
    ticket: int
    attempt: int
    state: str
    producer: str
    version: int
    overtaken: int
    used_at: tuple[int, ...]
    priority: float
    step: int
    reason: str
    reasons: tuple[str, ...]


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    ticket: int
    attempt: int
    meta: GroupMeta | None
    checksum: int
    lengths: tuple[int, ...]
    place: Place | None
    segment: str


_encoder = msgspec.msgpack.Encoder()
_transitions = msgspec.msgpack.Decoder(_Transition)
_payloads = msgspec.msgpack.Decoder(_Payload)
_steps = msgspec.msgpack.Decoder(StepRow)


def seal(body: bytes) -> bytes:
    """The bytes with their CRC-32 behind them."""
    return body + zlib.crc32(body).to_bytes(4, "little")


def unseal(blob: object, what: str) -> bytes:
    """The bytes without their CRC-32.

    Raises:
        DataError: they differ from what was written; names ``what``.
    """
    if not isinstance(blob, bytes) or zlib.crc32(blob[:-4]) != int.from_bytes(blob[-4:], "little"):
        raise DataError(f"{what} is damaged in the ledger: its CRC-32 differs")
    return blob[:-4]


def encode_group_row(row: GroupRow) -> bytes:
    """The row without what belongs to its payload."""
    r = row
    return seal(
        _encoder.encode(
            _Transition(
                r.ticket, r.attempt, r.state, r.producer, r.version, r.overtaken, r.used_at, r.priority, r.step, r.reason, r.reasons
            )
        )
    )


def encode_payload(row: GroupRow) -> bytes:
    """What belongs to the payload: meta, checksum, lengths, place or segment."""
    return seal(_encoder.encode(_Payload(row.ticket, row.attempt, row.meta, row.checksum, row.lengths, row.place, row.segment)))


def decode_group_row(ticket: int, state: str, step: int, blob: bytes, payload: bytes | None) -> GroupRow:
    """The whole row; payload facts that are damaged or of another attempt are left out.

    ``ticket``, ``state`` and ``step`` are the columns beside the blob, by which rows are found.

    Raises:
        DataError: the row itself is damaged.
    """
    what = f"the row of ticket {ticket}"
    t = _decoded(_transitions, unseal(blob, what), what)
    if (t.ticket, t.state, t.step) != (ticket, state, step):
        met = f"it says {(t.ticket, t.state, t.step)}, its columns {(ticket, state, step)}"
        raise DataError(f"{what} is damaged in the ledger: {met}")
    row = GroupRow(
        ticket=ticket,
        attempt=t.attempt,
        state=t.state,
        producer=t.producer,
        version=t.version,
        overtaken=t.overtaken,
        used_at=t.used_at,
        priority=t.priority,
        step=t.step,
        reason=t.reason,
        reasons=t.reasons,
    )
    facts = _payload(ticket, payload)
    if facts is None or (facts.ticket, facts.attempt) != (ticket, t.attempt):
        return row
    return msgspec.structs.replace(
        row, meta=facts.meta, checksum=facts.checksum, lengths=facts.lengths, place=facts.place, segment=facts.segment
    )


def encode_step(row: StepRow) -> bytes:
    """A step as a blob."""
    return seal(_encoder.encode(row))


def decode_step(step: int, blob: bytes) -> StepRow:
    """A step again. Raises DataError if it is damaged."""
    what = f"the row of step {step}"
    return _decoded(_steps, unseal(blob, what), what)


def _payload(ticket: int, blob: bytes | None) -> _Payload | None:
    if blob is None:
        return None
    what = f"the payload row of ticket {ticket}"
    try:
        return _decoded(_payloads, unseal(blob, what), what)
    except DataError:
        return None  # recovery finds a queued group without meta, says so, and has it issued again


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes, what: str) -> T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise DataError(f"{what} is of another layout: {error}; use the version of asyncrl that wrote it") from error
