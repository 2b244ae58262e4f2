"""Frames of one Arrow IPC stream back into rows, without trusting them and without copying their large columns.

Consumes one buffer or a list of frames; produces rows whose token columns are read-only views of the frames. Nothing is allocated
by a length that the stream claims: metadata and body are slices of what was received, compressed bodies and dictionaries are refused
unread, and Arrow validates offsets and strings before anything looks at them.

Source: design note, sections 3 and 4; Arrow columnar format, encapsulated messages.
"""

from __future__ import annotations

import bisect
import itertools
import json
import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.errors import SchemaError
from asyncrl.trajectory_frames import JOIN_BELOW_BYTES, MAX_SIBLINGS, SCHEMA, SCHEMA_VERSION, TOKEN_COLUMNS

__all__ = ["read_rows"]

_END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_rows(payload: Any) -> Iterator[dict[str, Any]]:
    """Rows of one group, in the order of the stream; ``payload`` is one buffer or a list of frames.

    Raises:
        SchemaError: another schema version, missing or unknown columns, too many rows, a null, or bytes that are no such stream.
    """
    frames = list(payload) if isinstance(payload, (list, tuple)) else [payload]
    memory = _Memory(frames)
    batch = None if memory.is_whole else _batch_around_tokens(memory)
    if batch is None:
        memory = memory if memory.is_whole else _Memory([b"".join(frames)])
        batch = _read_batch(memory)
    return _rows(batch, memory)


class _Memory:
    """Frames as one address space.

    Several frames are laid out in anonymous memory of their total size, into which only the small ones are copied: the pages of
    large frames are never touched there, and :meth:`view` reads the frames themselves.
    """

    def __init__(self, frames: Sequence[Any]) -> None:
        self._frames = [view for view in (memoryview(frame).cast("B") for frame in frames) if view.nbytes]
        self._starts = list(itertools.accumulate((view.nbytes for view in self._frames), initial=0))
        self.num_bytes = self._starts.pop()
        self.is_whole = len(self._frames) < 2
        self.left_out: list[tuple[int, int]] = []
        self._whole = self._frames[0] if len(self._frames) == 1 else memoryview(b"")
        if not self.is_whole:
            self._lay_out()
        self.buffer = pa.py_buffer(self._whole)

    def _lay_out(self) -> None:
        self._whole = memoryview(mmap.mmap(-1, self.num_bytes))
        for start, view in zip(self._starts, self._frames, strict=True):
            stop = start + view.nbytes
            if view.nbytes < JOIN_BELOW_BYTES:
                self._whole[start:stop] = view
            else:
                self.left_out.append((start, stop))

    def place(self, buffer: pa.Buffer) -> tuple[int, int]:
        """Byte range of an Arrow buffer that was read from this memory."""
        start = buffer.address - self.buffer.address
        return start, start + buffer.size

    def view(self, start: int, stop: int) -> memoryview:
        """The bytes of a range: a view if one frame holds them all, otherwise a copy."""
        if self.is_whole:
            return self._whole[start:stop]
        first = bisect.bisect_right(self._starts, start) - 1
        pieces = []
        for frame_start, view in zip(self._starts[first:], self._frames[first:], strict=True):
            if frame_start >= stop:
                break
            pieces.append(view[max(0, start - frame_start) : stop - frame_start])
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


def _batch_around_tokens(memory: _Memory) -> pa.RecordBatch | None:
    """The batch, if all that was left out of memory are values of token columns; None if anything else may have been.

    Token values lie in the body, behind all metadata, so that a batch that was read from pages left empty is never taken.
    """
    try:
        batch = _read_batch(memory)
    except SchemaError:
        return None
    buffers = [batch.column(name).values.buffers()[1] for name in TOKEN_COLUMNS]
    tokens = [memory.place(buffer) for buffer in buffers if buffer]
    covered = all(any(low <= start and stop <= high for low, high in tokens) for start, stop in memory.left_out)
    return batch if covered else None


def _read_batch(memory: _Memory) -> pa.RecordBatch:
    try:
        return _checked_batch(memory)
    except (pa.ArrowException, OSError, EOFError, StopIteration, struct.error, UnicodeDecodeError) as error:
        raise SchemaError(f"payload is not a readable Arrow stream: {error or 'it ends too early'}") from error


def _checked_batch(memory: _Memory) -> pa.RecordBatch:
    source = pa.BufferReader(memory.buffer)
    messages = pa.ipc.MessageReader.open_stream(source)
    schema = pa.ipc.read_schema(_next(messages, "schema"))
    _check_schema(schema)
    message = _next(messages, "record batch")
    if _is_compressed(message.metadata):
        raise SchemaError("a group is one uncompressed record batch; met a compressed one")
    batch = pa.ipc.read_record_batch(message, schema)
    if not 1 <= batch.num_rows <= MAX_SIBLINGS:
        raise SchemaError(f"a group has 1 to {MAX_SIBLINGS} rows; met {batch.num_rows}")
    _check_end(memory, source.tell())
    batch.validate(full=True)
    for name in SCHEMA.names:
        _check_nulls(name, batch.column(name))
    return batch


def _next(messages: Any, kind: str) -> Any:
    message = messages.read_next_message()
    if message.type != kind:
        raise SchemaError(f"payload is not a readable Arrow stream: a {kind} is next; met {message.type}")
    return message


def _check_end(memory: _Memory, position: int) -> None:
    rest = memory.num_bytes - position
    if rest != len(_END_MARK) or bytes(memory.view(position, memory.num_bytes)) != _END_MARK:
        raise SchemaError(
            f"payload is not a readable Arrow stream: an end mark of {len(_END_MARK)} bytes follows the batch; met {rest} bytes"
        )


def _check_schema(schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(b"asyncrl.schema_version", b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise SchemaError(f"schema version is {SCHEMA_VERSION}; met {version}: upgrade the older side")
    counts = {name: schema.names.count(name) for name in SCHEMA.names}
    missing = [f.name for f in SCHEMA if counts[f.name] != 1 or schema.field(f.name).type != f.type]
    if missing:
        raise SchemaError(f"columns missing or of another type: {', '.join(missing)}")
    unknown = [name for name in schema.names if name not in counts]
    if unknown:
        raise SchemaError(f"columns are those of schema version {SCHEMA_VERSION}; met {unknown[:8]}")


def _check_nulls(name: str, array: pa.Array) -> None:
    if array.null_count:
        raise SchemaError(f"{name}: no nulls; met {array.null_count}")
    if pa.types.is_list(array.type):
        _check_nulls(name, array.values)
    elif pa.types.is_struct(array.type):
        for i in range(array.type.num_fields):
            _check_nulls(name, array.field(i))


def _is_compressed(metadata: Any) -> bool:
    """Whether a record batch message names a compression: Arrow would allocate what the sender says it unpacks to."""
    view = memoryview(metadata)
    message = struct.unpack_from("<I", view, 0)[0]
    header = _flat_field(view, message, 2)
    batch = header + struct.unpack_from("<I", view, header)[0]
    return _flat_field(view, batch, 3) != 0


def _flat_field(view: memoryview, table: int, index: int) -> int:
    """Position of a flatbuffer table's field, 0 where it is absent. Arrow has verified the buffer."""
    vtable = table - struct.unpack_from("<i", view, table)[0]
    slot = 4 + 2 * index
    if slot >= struct.unpack_from("<H", view, vtable)[0]:
        return 0
    offset = int(struct.unpack_from("<H", view, vtable + slot)[0])
    return table + offset if offset else 0


def _rows(batch: pa.RecordBatch, memory: _Memory) -> Iterator[dict[str, Any]]:
    tokens = {name: _token_arrays(batch.column(name), dtype, memory) for name, dtype in TOKEN_COLUMNS.items()}
    names = [name for name in SCHEMA.names if name not in tokens]
    others = {name: batch.column(name).to_pylist() for name in names}
    for i in range(batch.num_rows):
        row = {name: values[i] for name, values in others.items()}
        row["extra"] = _extra(row["extra"], row["group_id"])
        yield {**row, **{name: arrays[i] for name, arrays in tokens.items()}}


def _token_arrays(column: pa.ListArray, dtype: np.dtype[Any], memory: _Memory) -> list[np.ndarray]:
    offsets = column.offsets.to_numpy().tolist()
    buffer = column.values.buffers()[1]
    start = memory.place(buffer)[0] if buffer else 0
    ranges = list(itertools.pairwise(offsets))
    if dtype.kind == "b":
        packed = np.frombuffer(memory.view(start, start + (offsets[-1] + 7) // 8), np.uint8)
        return [_bits(packed, low, high) for low, high in ranges]
    size = dtype.itemsize
    return [np.frombuffer(memory.view(start + low * size, start + high * size), dtype) for low, high in ranges]


def _bits(packed: np.ndarray, low: int, high: int) -> np.ndarray:
    first = low // 8
    bits = np.unpackbits(packed[first : (high + 7) // 8], count=high - 8 * first, bitorder="little").view(bool)[low - 8 * first :]
    bits.flags.writeable = False
    return bits


def _extra(text: str, group_id: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"extra is JSON; met {text[:80]!r}", group_id=group_id) from error
    if not isinstance(extra, dict):
        raise SchemaError(f"extra is a JSON object; met {text[:80]!r}", group_id=group_id)
    return extra
