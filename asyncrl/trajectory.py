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

from asyncrl.errors import SchemaError

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "GroupMeta",
    "Trajectory",
    "TrajectoryGroup",
    "VersionSpan",
    "decode_group",
    "encode_group",
]

SCHEMA_VERSION = 1
MAX_TOKENS = 1 << 22
MAX_SIBLINGS = 1 << 12

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
        return int(self.loss_mask.sum())

    @property
    def oldest_version(self) -> int:
        """Lowest step that sampled any token of it."""
        return min(span.version for span in self.version_spans)

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
    ticket: int
    attempt: int
    incarnation: int
    generator: str
    lengths_N: tuple[int, ...]
    prompt_lengths_N: tuple[int, ...]
    sampled_tokens_N: tuple[int, ...]
    rewards_N: tuple[float, ...]
    tokens_by_version: dict[int, int]
    payload_bytes: int = 0

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
            versions = trajectory.token_versions()
            values, numbers = np.unique(versions[versions >= 0], return_counts=True)
            counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
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


def encode_group(group: TrajectoryGroup) -> pa.Buffer:
    """One Arrow IPC stream holding the group's rows."""
    batch = pa.RecordBatch.from_pylist([_row(t) for t in group.trajectories], schema=SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def decode_group(payload: Any) -> TrajectoryGroup:
    """Reads one group back; token columns are views of the payload where Arrow allows it.

    Raises:
        SchemaError: another schema version, missing columns, too many rows, or a rule of
            :class:`Trajectory` broken; names the field and the value met.
    """
    try:
        with pa.ipc.open_stream(payload) as reader:
            _check_schema(reader.schema)
            table = reader.read_all().combine_chunks()
            table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(f"payload is not a readable Arrow stream: {error}") from error
    if not 1 <= table.num_rows <= MAX_SIBLINGS:
        raise SchemaError(f"a group has 1 to {MAX_SIBLINGS} rows; met {table.num_rows}")
    return TrajectoryGroup(trajectories=tuple(_from_rows(table)))


def _row(t: Trajectory) -> dict[str, Any]:
    row = {name: getattr(t, name) for name in SCHEMA.names}
    row["version_spans"] = [{"start": s.start, "version": s.version} for s in t.version_spans]
    row["reward_parts"] = [{"name": k, "value": v} for k, v in t.reward_parts.items()]
    row["extra"] = json.dumps(dict(t.extra))
    return row


def _from_rows(table: pa.Table) -> Iterator[Trajectory]:
    jagged = ("input_ids", "loss_mask", "behavior_logprobs")
    arrays = {name: table.column(name).combine_chunks() for name in jagged}
    scalars = table.drop_columns(list(jagged)).to_pylist()
    for i, row in enumerate(scalars):
        row["version_spans"] = [VersionSpan(s["start"], s["version"]) for s in row["version_spans"]]
        row["reward_parts"] = {p["name"]: p["value"] for p in row["reward_parts"]}
        try:
            row["extra"] = json.loads(row["extra"])
        except json.JSONDecodeError as error:
            raise SchemaError(f"extra is JSON; met {row['extra'][:80]!r}", group_id=row["group_id"]) from error
        values = {name: arrays[name][i].values.to_numpy(zero_copy_only=False) for name in jagged}
        yield Trajectory.checked(**row, **values)


def _check_schema(schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(b"asyncrl.schema_version", b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise SchemaError(f"schema version is {SCHEMA_VERSION}; met {version}: upgrade the older side")
    missing = [f.name for f in SCHEMA if f.name not in schema.names or schema.field(f.name).type != f.type]
    if missing:
        raise SchemaError(f"columns missing or of another type: {', '.join(missing)}")


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
    if not np.isfinite(logprobs).all():
        fail("behavior_logprobs", "finite", float(logprobs[~np.isfinite(logprobs)][0]))
    if float(logprobs.max()) > 1e-3:
        fail("behavior_logprobs", "log-probs are not positive", float(logprobs.max()))
    if np.any(logprobs[~t.loss_mask] != 0.0):
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
