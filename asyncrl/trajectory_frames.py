"""The Arrow schema of trajectories, and the writer that turns columns into frames of one Arrow IPC stream.

Consumes columns of one group; produces frames (buffers) that concatenate to exactly one stream: schema, one record batch,
end mark. The two large columns are never copied: Arrow lays out the batch around hollow buffers (address space that nobody
reads or writes), and the frames name the callers' own arrays in their place.

Source: design note, sections 3 and 4; Arrow columnar format, encapsulated messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["JOIN_BELOW_BYTES", "MAX_SIBLINGS", "SCHEMA", "SCHEMA_VERSION", "TOKEN_COLUMNS", "Buffer", "join_small", "write_frames"]

Buffer = Any  # bytes, memoryview or pa.Buffer: something with contiguous bytes

SCHEMA_VERSION = 1
MAX_SIBLINGS = 1 << 12
JOIN_BELOW_BYTES = 1 << 16  # a frame costs some microseconds at each hop; copying 64 KiB costs about as much

_SPAN = pa.struct([pa.field("start", pa.int32(), False), pa.field("version", pa.int64(), False)])
_PART = pa.struct([pa.field("name", pa.string(), False), pa.field("value", pa.float64(), False)])

SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), False),
        pa.field("ticket", pa.int64(), False),
        pa.field("attempt", pa.int32(), False),
        pa.field("sibling", pa.int32(), False),
        pa.field("sample", pa.int32(), False),
        pa.field("prompt_id", pa.string(), False),
        pa.field("seed", pa.int64(), False),
        pa.field("incarnation", pa.int32(), False),
        pa.field("input_ids", pa.list_(pa.field("item", pa.int32(), False)), False),
        pa.field("loss_mask", pa.list_(pa.field("item", pa.bool_(), False)), False),
        pa.field("behavior_logprobs", pa.list_(pa.field("item", pa.float32(), False)), False),
        pa.field("version_spans", pa.list_(pa.field("item", _SPAN, False)), False),
        pa.field("reward", pa.float64(), False),
        pa.field("reward_parts", pa.list_(pa.field("item", _PART, False)), False),
        pa.field("finish_reason", pa.string(), False),
        pa.field("temperature", pa.float32(), False),
        pa.field("generator", pa.string(), False),
        pa.field("engine", pa.string(), False),
        pa.field("dispatched_s", pa.float64(), False),
        pa.field("finished_s", pa.float64(), False),
        pa.field("extra", pa.string(), False),
    ],
    metadata={"asyncrl.schema_version": str(SCHEMA_VERSION)},
)

TOKEN_COLUMNS = {"input_ids": np.dtype(np.int32), "loss_mask": np.dtype(bool), "behavior_logprobs": np.dtype(np.float32)}


def write_frames(columns: Mapping[str, Sequence[Any]]) -> list[Buffer]:
    """Frames of one group; concatenated they are one Arrow IPC stream of one record batch.

    Args:
        columns: every column of :data:`SCHEMA`, one entry a trajectory; token columns are arrays [T], ``version_spans``
            pairs (start, version), ``reward_parts`` pairs (name, value), all others plain values.

    Returns:
        Frames that view the arrays of ``input_ids`` and ``behavior_logprobs``: they must not be changed before the frames are sent.
        Pieces under :data:`JOIN_BELOW_BYTES` are joined with their neighbours.
    """
    sink = _Sink()
    arrays = [_column(field, columns[field.name], sink) for field in SCHEMA]
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    return join_small(sink.pieces)


def join_small(pieces: Iterable[Any], below_bytes: int = JOIN_BELOW_BYTES) -> list[Buffer]:
    """The same bytes with every run of pieces smaller than ``below_bytes`` as one frame; larger ones stay as they are."""
    frames: list[Buffer] = []
    small: list[Any] = []
    for piece in pieces:
        if memoryview(piece).nbytes < below_bytes:
            small.append(piece)
            continue
        if small:
            frames.append(b"".join(small))
            small = []
        frames.append(piece)
    if small:
        frames.append(b"".join(small))
    return frames


class _Sink:
    """A file for Arrow that keeps what is written by reference and puts arrays where their hollow stand-ins come by."""

    closed = False

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self._hollow: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}

    def stand_in(self, arrays_N: list[np.ndarray], dtype: np.dtype[Any], num_items: int) -> pa.Buffer:
        """A buffer as long as all arrays together, none of whose pages is ever touched."""
        hollow = np.empty(num_items, dtype)
        buffer = pa.py_buffer(hollow)
        self._hollow[buffer.address] = (hollow, arrays_N)
        return buffer

    def write(self, piece: Any) -> int:
        size = memoryview(piece).nbytes
        known = self._hollow.get(piece.address) if isinstance(piece, pa.Buffer) else None
        if known is not None and known[0].nbytes == size:
            self.pieces.extend(array.data.cast("B") for array in known[1])
        else:
            self.pieces.append(piece)
        return size

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing to close."""


def _column(field: pa.Field, values: Sequence[Any], sink: _Sink) -> pa.Array:
    if field.name in TOKEN_COLUMNS:
        return _token_column(field.type, values, TOKEN_COLUMNS[field.name], sink)
    if field.name in ("version_spans", "reward_parts"):
        return _pairs_column(field.type, values)
    return pa.array(values, type=field.type)


def _token_column(kind: pa.ListType, arrays_N: Sequence[np.ndarray], dtype: np.dtype[Any], sink: _Sink) -> pa.Array:
    arrays = [np.ascontiguousarray(array, dtype) for array in arrays_N]
    offsets = _offsets([len(array) for array in arrays])
    num_items = int(offsets[-1])
    buffer = pa.py_buffer(_packed(arrays)) if dtype.kind == "b" else sink.stand_in(arrays, dtype, num_items)
    values = pa.Array.from_buffers(kind.value_type, num_items, [None, buffer], null_count=0)
    return pa.Array.from_buffers(kind, len(arrays), [None, pa.py_buffer(offsets)], null_count=0, children=[values])


def _packed(arrays: Sequence[np.ndarray]) -> bytes:
    """One bit an entry, lowest first, without ever holding all entries as bytes."""
    parts, rest = [], np.empty(0, bool)
    for array in arrays:
        bits = np.concatenate([rest, array])
        whole = len(bits) & ~7
        parts.append(np.packbits(bits[:whole], bitorder="little").data)
        rest = bits[whole:]
    return b"".join([*parts, np.packbits(rest, bitorder="little").data])


def _pairs_column(kind: pa.ListType, rows_N: Sequence[Sequence[tuple[Any, Any]]]) -> pa.Array:
    item = kind.value_type
    children = [pa.array([pair[i] for row in rows_N for pair in row], type=item.field(i).type) for i in range(2)]
    values = pa.StructArray.from_arrays(children, fields=[item.field(0), item.field(1)])
    offsets = _offsets([len(row) for row in rows_N])
    return pa.Array.from_buffers(kind, len(rows_N), [None, pa.py_buffer(offsets)], null_count=0, children=[values])


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets.astype(np.int32)
