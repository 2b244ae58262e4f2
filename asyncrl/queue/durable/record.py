"""Headers in a log segment: a file opens with one, and so does each payload.

    segment file = file header (256 bytes) | record | record | …
    record       = record header (64 bytes) | payload | zeros up to a multiple of 64

All numbers are little-endian, and a CRC-32 of the header itself ends it. A record header names its own place, so that a block
that a disk wrote elsewhere is found out. The payload is a whole Arrow IPC stream and starts at a multiple of 64.

Source: design note, section 4, "Durability".
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import xxhash

from asyncrl.errors import DataError

__all__ = ["ALIGNMENT", "FILE_HEADER_BYTES", "FORMAT", "RECORD_HEADER_BYTES", "FileHeader", "RecordHeader", "aligned", "payload_checksum"]

FORMAT = 1
ALIGNMENT = 64
RECORD_HEADER_BYTES = 64
FILE_HEADER_BYTES = 256
MAX_RUN_ID_BYTES = 192

_RECORD = struct.Struct("<8sIIQQQQQ4xI")  # magic, format, attempt, ticket, segment, offset, length, checksum, crc
_FILE = struct.Struct(f"<8sIIQI{MAX_RUN_ID_BYTES}sI28xI")  # magic, format, shard, number, bytes of the run id, run id, recycled, crc
_RECORD_MAGIC = b"ARLQREC\n"
_FILE_MAGIC = b"ARLQSEG\n"
assert _RECORD.size == RECORD_HEADER_BYTES
assert _FILE.size == FILE_HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """What a record says of its payload: whose it is, where (bytes within the segment file), and its xxh3-64."""

    ticket: int
    attempt: int
    segment: int
    offset: int
    length: int
    checksum: int

    def pack(self) -> bytes:
        """The 64 bytes before the payload."""
        numbers = (self.attempt, self.ticket, self.segment, self.offset, self.length, self.checksum)
        return _sealed(_RECORD.pack(_RECORD_MAGIC, FORMAT, *numbers, 0))

    @classmethod
    def parse(cls, data: bytes) -> RecordHeader:
        """Reads a header.

        Raises:
            DataError: cut short, damaged, no header, or of another format.
        """
        _check_sealed(data, RECORD_HEADER_BYTES, _RECORD_MAGIC, "record header")
        _, _, attempt, ticket, segment, offset, length, checksum, _ = _RECORD.unpack(data)
        return cls(ticket=ticket, attempt=attempt, segment=segment, offset=offset, length=length, checksum=checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """Whose segment file this is; ``recycled``: bytes of an earlier segment follow the last record."""

    run_id: str
    shard: int
    number: int
    recycled: bool = False

    def pack(self) -> bytes:
        """The first 256 bytes of the file.

        Raises:
            DataError: a run id of more than 192 bytes.
        """
        name = self.run_id.encode()
        if len(name) > MAX_RUN_ID_BYTES:
            raise DataError(f"a run id has at most {MAX_RUN_ID_BYTES} bytes; met {len(name)}: {self.run_id[:40]!r}…: choose a shorter one")
        return _sealed(_FILE.pack(_FILE_MAGIC, FORMAT, self.shard, self.number, len(name), name, self.recycled, 0))

    @classmethod
    def parse(cls, data: bytes) -> FileHeader:
        """Reads a header.

        Raises:
            DataError: cut short, damaged, no header, or of another format.
        """
        _check_sealed(data, FILE_HEADER_BYTES, _FILE_MAGIC, "file header")
        _, _, shard, number, length, name, recycled, _ = _FILE.unpack(data)
        return cls(run_id=name[:length].decode(), shard=shard, number=number, recycled=bool(recycled))


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment.

    Example:
        >>> aligned(1), aligned(64), aligned(65)
        (64, 64, 128)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def payload_checksum(payload: Any) -> int:
    """xxh3-64 of a contiguous buffer."""
    return int(xxhash.xxh3_64_intdigest(payload))


def _sealed(header: bytes) -> bytes:
    body = header[:-4]
    return body + zlib.crc32(body).to_bytes(4, "little")


def _check_sealed(data: bytes, size: int, magic: bytes, what: str) -> None:
    if len(data) < size:
        raise DataError(f"{what} cut short: {len(data)} of {size} bytes are there")
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise DataError(f"{what} damaged: its CRC-32 differs")
    if not data.startswith(magic):
        raise DataError(f"{what} begins with {magic!r}; met {data[: len(magic)]!r}")
    met = int.from_bytes(data[len(magic) : len(magic) + 4], "little")
    if met != FORMAT:
        raise DataError(f"{what} has format {FORMAT}; met {met}: it was written by another version of asyncrl, use that one")
