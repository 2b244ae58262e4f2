"""The one data contract: what a generator hands to the queue and the learner takes out of it.

A row is a trajectory: a token sequence of which some tokens were sampled by a policy whose
version is known per segment. The rows of a group (same prompt) travel together as one Arrow
record batch. Ragged names: ``_G`` groups, ``_N`` trajectories, ``_T`` tokens of one trajectory.

Source: design note, section 3.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.bounds import Count
from asyncrl.errors import SchemaError
from asyncrl.trajectory_frames import SCHEMA, SCHEMA_VERSION, Buffer, write_frames
from asyncrl.trajectory_reader import read_rows

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "GroupMeta",
    "Trajectory",
    "TrajectoryGroup",
    "VersionSpan",
    "decode_group",
    "encode_group",
    "encode_group_frames",
]

MAX_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens from index ``start`` up to the next span were sampled by step ``version`` of the policy."""

    start: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled sequence.

    Attributes:
        group_id: the group (same prompt, same ticket) it belongs to.
        ticket: admission ticket number; attempt: how often the ticket was issued before.
        sibling: index within the group; sample: 0 unless a broken template split the sibling.
        prompt_id: identity of the prompt in its source; seed: sampling seed.
        incarnation: the learner incarnation whose versions the spans count in.
        input_ids: int32 [T], the ids that the engine was given and returned, prompt first.
        loss_mask: bool [T], True where a token was sampled and is trained.
        behavior_logprobs: float32 [T], entry i is the log-prob of token i under the distribution
            that sampled it; 0.0 where nothing was sampled, and at position 0.
        version_spans: ascending starts; every sampled token lies in a span.
        reward: finite; reward_parts: named parts of it.
        temperature: the sampling temperature, inside the softmax.
        dispatched_s, finished_s: unix time in seconds.
        extra: anything that the task wants to keep, JSON-serialisable.

    Raises:
        SchemaError: on construction through :meth:`checked`, naming the field and the value.

    Example:
        >>> t = Trajectory.checked(
        ...     group_id="g7", ticket=7, attempt=0, sibling=0, sample=0, prompt_id="p7", seed=1,
        ...     incarnation=0, input_ids=[5, 6, 9], loss_mask=[False, False, True],
        ...     behavior_logprobs=[0.0, 0.0, -0.5], version_spans=[VersionSpan(2, 3)], reward=1.0,
        ...     finish_reason="stop", temperature=1.0, generator="generator-0", engine="vllm",
        ...     dispatched_s=0.0, finished_s=1.0)
        >>> t.oldest_version, t.prompt_length, t.num_sampled_tokens
        (3, 2, 1)
    """

    group_id: str
    ticket: int
    attempt: int
    sibling: int
    sample: int
    prompt_id: str
    seed: int
    incarnation: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    reward: float
    finish_reason: str
    temperature: float
    generator: str
    engine: str
    dispatched_s: float
    finished_s: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def checked(cls, **fields: Any) -> Trajectory:
        """Builds a trajectory from arrays or plain lists and checks every rule of the schema."""
        fields["input_ids"] = np.asarray(fields["input_ids"], dtype=np.int32)
        fields["loss_mask"] = np.asarray(fields["loss_mask"], dtype=bool)
        fields["behavior_logprobs"] = np.asarray(fields["behavior_logprobs"], dtype=np.float32)
        fields["version_spans"] = tuple(fields["version_spans"])
        trajectory = cls(**fields)
        _check(trajectory)
        return trajectory

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens with loss_mask True."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def oldest_version(self) -> int:
        """Lowest step that sampled any token of it."""
        return min(span.version for span in self.version_spans)

    def tokens_by_version(self) -> dict[int, int]:
        """Number of sampled tokens by the step that sampled them."""
        counts = Counter[int]()
        for span, end in self._spans():
            counts[span.version] += int(np.count_nonzero(self.loss_mask[span.start : end]))
        return {version: number for version, number in counts.items() if number}

    def token_versions(self) -> np.ndarray:
        """int64 [T]: the step that sampled each token, -1 where loss_mask is False."""
        versions = np.full(len(self), -1, dtype=np.int64)
        for span, end in self._spans():
            versions[span.start : end] = span.version
        versions[~self.loss_mask] = -1
        return versions

    def _spans(self) -> Iterator[tuple[VersionSpan, int]]:
        ends = [span.start for span in self.version_spans[1:]] + [len(self)]
        yield from zip(self.version_spans, ends, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeta:
    """What planning needs to know of a group without its tokens.

    ``tokens_by_version`` counts sampled tokens; lists are ordered by sibling (``_N``).
    """

    group_id: str
    ticket: Count
    attempt: Count
    incarnation: Count
    generator: str
    lengths_N: tuple[Count, ...]
    prompt_lengths_N: tuple[Count, ...]
    sampled_tokens_N: tuple[Count, ...]
    rewards_N: tuple[float, ...]
    tokens_by_version: dict[Count, Count]
    payload_bytes: Count = 0

    @property
    def oldest_version(self) -> int:
        """Lowest step that sampled any token of the group."""
        return min(self.tokens_by_version)

    @property
    def newest_version(self) -> int:
        """Highest step that sampled any token of the group."""
        return max(self.tokens_by_version)

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens of all siblings together."""
        return sum(self.sampled_tokens_N)

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ at all; decided by comparison, before any division."""
        return max(self.rewards_N) != min(self.rewards_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The siblings sampled for one ticket, ordered by (sibling, sample)."""

    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        _check_group(self.trajectories)

    @property
    def group_id(self) -> str:
        """The identity that all siblings share."""
        return self.trajectories[0].group_id

    @property
    def ticket(self) -> int:
        """The admission ticket that all siblings share."""
        return self.trajectories[0].ticket

    def meta(self, payload_bytes: int = 0) -> GroupMeta:
        """Summarises the group for the planner; ``payload_bytes`` is its size on the wire."""
        first, counts = self.trajectories[0], Counter[int]()
        for trajectory in self.trajectories:
            counts.update(trajectory.tokens_by_version())
        return GroupMeta(
            group_id=first.group_id,
            ticket=first.ticket,
            attempt=first.attempt,
            incarnation=first.incarnation,
            generator=first.generator,
            lengths_N=tuple(len(t) for t in self.trajectories),
            prompt_lengths_N=tuple(t.prompt_length for t in self.trajectories),
            sampled_tokens_N=tuple(t.num_sampled_tokens for t in self.trajectories),
            rewards_N=tuple(t.reward for t in self.trajectories),
            tokens_by_version=dict(counts),
            payload_bytes=payload_bytes,
        )


def encode_group_frames(group: TrajectoryGroup) -> list[Buffer]:
    """The group's rows as frames that concatenate to one Arrow IPC stream.

    Large token columns are views of the trajectories' own arrays: do not change those before the frames are sent.
    """
    rows = group.trajectories
    columns: dict[str, list[Any]] = {name: [getattr(t, name) for t in rows] for name in SCHEMA.names}
    columns["version_spans"] = [[(s.start, s.version) for s in t.version_spans] for t in rows]
    columns["reward_parts"] = [list(t.reward_parts.items()) for t in rows]
    columns["extra"] = [json.dumps(dict(t.extra)) for t in rows]
    return write_frames(columns)


def encode_group(group: TrajectoryGroup) -> pa.Buffer:
    """One Arrow IPC stream holding the group's rows, in one piece."""
    return pa.py_buffer(b"".join(encode_group_frames(group)))


def decode_group(payload: Any) -> TrajectoryGroup:
    """Reads one group back from one buffer or a list of frames; token columns are read-only views of it.

    Raises:
        SchemaError: another schema version, missing columns, too many rows, or a rule of
            :class:`Trajectory` broken; names the field and the value met.
    """
    return TrajectoryGroup(trajectories=tuple(_from_row(row) for row in read_rows(payload)))


def _from_row(row: dict[str, Any]) -> Trajectory:
    row["version_spans"] = [VersionSpan(s["start"], s["version"]) for s in row["version_spans"]]
    row["reward_parts"] = {p["name"]: p["value"] for p in row["reward_parts"]}
    return Trajectory.checked(**row)


def _check(t: Trajectory) -> None:
    size = len(t.input_ids)

    def fail(name: str, rule: str, met: object) -> None:
        raise SchemaError(f"{name}: {rule}; met {met}", group_id=t.group_id, sibling=t.sibling)

    if not 2 <= size <= MAX_TOKENS:
        fail("input_ids", f"2 to {MAX_TOKENS} tokens", size)
    for name in ("loss_mask", "behavior_logprobs"):
        if len(getattr(t, name)) != size:
            fail(name, f"as long as input_ids ({size})", len(getattr(t, name)))
    if int(t.input_ids.min()) < 0:
        fail("input_ids", "token ids are not negative", int(t.input_ids.min()))
    if t.loss_mask[0]:
        fail("loss_mask", "the first token has no log-prob and is masked", True)
    if not t.loss_mask.any():
        fail("loss_mask", "at least one sampled token", 0)
    _check_logprobs(t, fail)
    _check_spans(t, fail)
    if not math.isfinite(t.reward):
        fail("reward", "finite", t.reward)
    if not (math.isfinite(t.temperature) and t.temperature > 0):
        fail("temperature", "positive and finite", t.temperature)
    if min(t.ticket, t.attempt, t.sibling, t.sample, t.incarnation) < 0:
        fail("ticket", "counters are not negative", (t.ticket, t.attempt, t.sibling, t.sample, t.incarnation))


def _check_logprobs(t: Trajectory, fail: Any) -> None:
    logprobs = t.behavior_logprobs
    lowest, highest = float(logprobs.min()), float(logprobs.max())  # NaN where any entry is
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        fail("behavior_logprobs", "finite", float(logprobs[~np.isfinite(logprobs)][0]))
    if highest > 1e-3:
        fail("behavior_logprobs", "log-probs are not positive", highest)
    if np.greater(logprobs != 0.0, t.loss_mask).any():
        fail("behavior_logprobs", "0.0 where loss_mask is False", "another value")


def _check_spans(t: Trajectory, fail: Any) -> None:
    if not t.version_spans:
        fail("version_spans", "at least one span", 0)
    starts = [s.start for s in t.version_spans]
    versions = [s.version for s in t.version_spans]
    if starts != sorted(set(starts)) or starts[0] < 0 or starts[-1] >= len(t):
        fail("version_spans", f"ascending starts within 0..{len(t) - 1}", starts)
    if versions != sorted(versions) or versions[0] < 0:
        fail("version_spans", "versions not negative and never falling", versions)
    if starts[0] > t.prompt_length:
        fail("version_spans", f"the first span starts at or before the first sampled token ({t.prompt_length})", starts[0])


def _check_group(trajectories: Sequence[Trajectory]) -> None:
    if not trajectories:
        raise SchemaError("a group has at least one trajectory; met none")
    first = trajectories[0]
    keys = {(t.group_id, t.ticket, t.attempt, t.prompt_id, t.incarnation) for t in trajectories}
    if len(keys) != 1:
        raise SchemaError(f"one group_id, ticket, attempt, prompt and incarnation in a group; met {sorted(keys)[:3]}")
    order = [(t.sibling, t.sample) for t in trajectories]
    if order != sorted(set(order)):
        raise SchemaError(f"siblings ascending and distinct; met {order}", group_id=first.group_id)
