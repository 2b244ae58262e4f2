"""Frames of queue messages: encoding, limits, and refusals as errors. No sockets.

A client keeps one :class:`Dialogue`; it numbers requests, refuses what is too large before it is sent, and turns
a ``Refused`` reply back into the error class that the broker named.

Source: design note, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl import errors
from asyncrl.bounds import Count
from asyncrl.errors import AsyncRLError, QueueError, SchemaError
from asyncrl.queue.messages import PROTOCOL_VERSION, Refused, Reply, ReplyBody, Request, RequestBody

__all__ = ["MAX_HEADER_BYTES", "Dialogue", "Envelope", "decode_envelope", "decode_request", "encode", "worth_saying"]

MAX_HEADER_BYTES = 16 << 20
SAY_FIRST = 8

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a request that every protocol version must have; read before anything else."""

    protocol: Count
    run_id: str
    sender: str
    sequence: Count


_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(message: Request | Reply) -> bytes:
    """One msgpack frame."""
    return _encoder.encode(message)


def decode_envelope(frame: Any) -> Envelope:
    """Reads protocol, run, sender and sequence number of a request without looking at its body.

    Raises:
        SchemaError: not msgpack, too long, or a field missing or of another type.
    """
    if len(frame) > MAX_HEADER_BYTES:
        raise SchemaError(f"a request header has at most {MAX_HEADER_BYTES} bytes; met {len(frame)}")
    try:
        return _envelope_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"a request begins with a msgpack header of protocol {PROTOCOL_VERSION}; met {error}") from error


def decode_request(frame: Any) -> Request:
    """Reads a whole request header.

    Raises:
        SchemaError: unknown type of message, or a field missing or of another type.
    """
    try:
        return _request_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"the body is one of the queue's requests; met {error}") from error


def worth_saying(number: int) -> bool:
    """Whether the log tells of the n-th refusal of a kind: the first few, then each power of two, so that no sender can fill a disk.

    Example:
        >>> [n for n in range(1, 40) if worth_saying(n)]
        [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
    """
    return number <= SAY_FIRST or not number & (number - 1)


class Dialogue:
    """One client's side of the conversation, without its socket.

    Args:
        endpoint: where the broker listens; named in every error.
        run_id, sender: stamped on each request.
        keys: folder of the CURVE keys of sender and queue; empty: none.
        max_message_bytes: the broker closes the connection on a larger frame without a word, so it is refused here.
    """

    def __init__(self, *, endpoint: str, run_id: str, sender: str, max_message_bytes: int, keys: str = "") -> None:
        self.endpoint = endpoint
        self.sender = sender
        self.keys = keys
        self.max_message_bytes = max_message_bytes
        self._run_id = run_id
        self._next = 0

    def request(self, body: RequestBody, payloads: Sequence[Any] = ()) -> tuple[int, list[Any]]:
        """Sequence number and frames of a request; the number is taken only by :meth:`sent`.

        Raises:
            QueueError: a frame is larger than the broker accepts.
        """
        sequence = self._next
        header = Request(protocol=PROTOCOL_VERSION, run_id=self._run_id, sender=self.sender, sequence=sequence, body=body)
        frames = [encode(header), *payloads]
        for frame in frames:
            self.check_size(memoryview(frame).nbytes)
        return sequence, frames

    def check_size(self, num_bytes: int) -> None:
        """Refuses a frame that the broker would not take."""
        if num_bytes > self.max_message_bytes:
            raise QueueError(
                f"a message has at most queue.max_message_mib = {self.max_message_bytes >> 20} MiB ({self.max_message_bytes} bytes); "
                f"met {num_bytes} bytes: raise it, or lower algorithm.group_size or generator.max_new_tokens",
                endpoint=self.endpoint,
                num_bytes=num_bytes,
            )

    def sent(self, sequence: int) -> None:
        """The request with this number is on its way: the next one gets the next number."""
        self._next = sequence + 1

    def reply(self, frames: Sequence[Any]) -> tuple[int, ReplyBody, list[Any]]:
        """Sequence number, body and payload frames of a reply.

        Raises:
            SchemaError: the frames are no reply.
        """
        try:
            reply = _reply_decoder.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
            raise SchemaError(f"{self.endpoint} answers with replies of protocol {PROTOCOL_VERSION}; met {error}") from error
        return reply.sequence, reply.body, list(frames[1:])

    def refusal(self, body: Refused) -> AsyncRLError:
        """The error that a refusal stands for."""
        kind = getattr(errors, body.kind, QueueError)
        known = isinstance(kind, type) and issubclass(kind, AsyncRLError)
        return (kind if known else QueueError)(body.message, endpoint=self.endpoint, sender=self.sender)
