"""Finished groups that arrive: what is checked of them, where their payload goes, and what the sender is told.

Metadata is checked here, against itself, its frames and the ticket. The payload is checked by the rank that trains it.

Source: design note, section 4; faults B31, B51.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from asyncrl.errors import AsyncRLError, DiskFull, QueueError, SchemaError
from asyncrl.queue.gate import Gate
from asyncrl.queue.messages import Put, PutItem
from asyncrl.queue.store import PayloadStore
from asyncrl.queue.wire import worth_saying
from asyncrl.trajectory import MAX_TOKENS, GroupMeta
from asyncrl.trajectory_frames import MAX_SIBLINGS

__all__ = ["Puts", "check_frames", "check_meta"]

log = logging.getLogger(__name__)
MAX_FRAMES = 2 * MAX_SIBLINGS + 16
MAX_GROUPS = 256


class Puts:
    """Takes groups in for one broker.

    Attributes:
        full: why nothing can be kept at present, empty while it can; needed_bytes: what the last group wanted.
    """

    def __init__(self, store: PayloadStore, refused: Counter[str]) -> None:
        self._store = store
        self._refused = refused
        self.full = ""
        self.needed_bytes = 0

    def put(self, gate: Gate, sender: str, body: Put, frames: Sequence[Any], now_s: float) -> list[str]:
        """An outcome for each group of a put.

        Raises:
            SchemaError: the frames are not those that the header announces; no group is looked at.
        """
        check_frames(body, frames)
        outcomes, position = [], 0
        for item in body.groups:
            number = 0 if item.segment else len(item.lengths)
            outcomes.append(self._one(gate, sender, item, frames[position : position + number], now_s))
            position += number
        return outcomes

    def _one(self, gate: Gate, sender: str, item: PutItem, frames: Sequence[Any], now_s: float) -> str:
        ticket, attempt = item.meta.ticket, item.meta.attempt
        wanted = gate.expects(sender, ticket, attempt)
        try:
            check_meta(item)
            if wanted:
                self._store.keep(ticket, attempt, item, frames)
            outcome = gate.finish(sender, item.meta, now_s)
        except DiskFull as error:
            self.full, self.needed_bytes = str(error), item.meta.payload_bytes
            return f"held: {error}"
        except AsyncRLError as error:
            kind = type(error).__name__
            number = self._refused[kind] = self._refused[kind] + 1
            if worth_saying(number):
                log.warning("refused ticket %d, attempt %d, of %s (%s, %d so far): %s", ticket, attempt, sender, kind, number, error)
            if isinstance(error, SchemaError | QueueError) and wanted:
                gate.fail(sender, ticket, attempt, f"refused: {error}")
            outcome = f"refused: {error}"
        if not wanted or ticket not in self._store:
            self._store.unkept(item, sender)
        elif outcome != "accepted":
            self._store.settle(ticket, retain=False)
        return outcome


def check_frames(body: Put, frames: Sequence[Any]) -> None:
    """Counts and sizes of the frames against the header.

    Raises:
        SchemaError: they differ, or are out of bounds.
    """
    if not 1 <= len(body.groups) <= MAX_GROUPS:
        raise SchemaError(f"a put has 1 to {MAX_GROUPS} groups; met {len(body.groups)}")
    announced: list[int] = []
    for item in body.groups:
        if not 1 <= len(item.lengths) <= MAX_FRAMES or min(item.lengths) < 1:
            raise SchemaError(f"a payload has 1 to {MAX_FRAMES} frames of a byte or more; met {item.lengths[:8]}", ticket=item.meta.ticket)
        if not item.segment:
            announced.extend(item.lengths)
    met = [len(frame) for frame in frames]
    if announced != met:
        raise SchemaError(f"frames have the announced sizes {announced[:8]}; met {met[:8]} ({len(announced)} and {len(met)} frames)")


def check_meta(item: PutItem) -> None:
    """Whether metadata agrees with itself.

    Raises:
        SchemaError: it does not, naming the field.
    """
    meta = item.meta
    siblings = len(meta.lengths_N)
    lists: dict[str, Sequence[float]] = {
        "prompt_lengths_N": meta.prompt_lengths_N,
        "sampled_tokens_N": meta.sampled_tokens_N,
        "rewards_N": meta.rewards_N,
    }
    if not 1 <= siblings <= MAX_SIBLINGS:
        _fail(meta, "lengths_N", f"1 to {MAX_SIBLINGS} siblings", siblings)
    for name, values in lists.items():
        if len(values) != siblings:
            _fail(meta, name, f"one entry for each of {siblings} siblings", len(values))
    if min(meta.ticket, meta.attempt, meta.incarnation) < 0:
        _fail(meta, "ticket", "counters are not negative", (meta.ticket, meta.attempt, meta.incarnation))
    if min(meta.lengths_N) < 2 or max(meta.lengths_N) > MAX_TOKENS:
        _fail(meta, "lengths_N", f"2 to {MAX_TOKENS} tokens", meta.lengths_N[:8])
    for length, prompt, sampled in zip(meta.lengths_N, meta.prompt_lengths_N, meta.sampled_tokens_N, strict=True):
        if not (1 <= prompt < length and 1 <= sampled <= length - prompt):
            _fail(meta, "sampled_tokens_N", f"a prompt and sampled tokens within {length}", (prompt, sampled))
    if not all(map(math.isfinite, meta.rewards_N)):
        _fail(meta, "rewards_N", "finite", meta.rewards_N[:8])
    versions = meta.tokens_by_version
    if not versions or min(versions) < 0 or min(versions.values()) < 1 or sum(versions.values()) != sum(meta.sampled_tokens_N):
        _fail(meta, "tokens_by_version", f"positive counts that sum to {sum(meta.sampled_tokens_N)}", dict(list(versions.items())[:8]))
    if meta.payload_bytes != sum(item.lengths):
        _fail(meta, "payload_bytes", f"the sum of the frames, {sum(item.lengths)}", meta.payload_bytes)
    if item.source and not (item.segment and item.source.startswith(("ipc://", "tcp://"))):
        _fail(meta, "source", "ipc:// or tcp://, with the name that the payload has there", (item.source, item.segment))
    if not 0 <= item.checksum < 1 << 64:
        _fail(meta, "checksum", "64 bits", item.checksum)


def _fail(meta: GroupMeta, name: str, rule: str, met: object) -> None:
    raise SchemaError(f"{name}: {rule}; met {met}", ticket=meta.ticket)
