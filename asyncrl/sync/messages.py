"""Every message between the publisher (beside the learner) and a receiver (inside a generator).

An update runs prepare → transfer → verify → commit, each phase with a deadline; a version is visible only
after commit. One msgpack frame a message, tagged by type; tensors travel by the transport that the
update names, never in these messages.

Source: design note, section 6.
"""

from __future__ import annotations

import msgspec

SYNC_PROTOCOL_VERSION = 1


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor under its Hugging Face name: dtype name of torch, shape, place in the payload, CRC-32 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: int


class UpdateManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a receiver needs to fetch and check one version.

    ``ties`` maps a tied name that is not sent to the name that is. ``location`` is for the transport alone.
    ``in_flight`` says what happens to running requests: recompute, restart or drain. ``hold``: lockstep, the receiver
    commits only after the queue said that no further ticket asks for the version before.
    """

    update_id: int
    incarnation: int
    version: int
    transport: str
    location: str
    total_bytes: int
    tensors: tuple[TensorSpec, ...]
    ties: dict[str, str]
    in_flight: str
    hold: bool


# publisher → receiver


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Check names, shapes and dtypes, and attach to the location."""

    manifest: UpdateManifest


class Transfer(msgspec.Struct, frozen=True, kw_only=True, tag="transfer"):
    """Read the bytes and verify every checksum."""

    update_id: int


class CommitUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="commit_update"):
    """Load into the engine and stamp the version."""

    update_id: int


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Forget the update; the receiver is quarantined until it joins again."""

    update_id: int
    reason: str


# receiver → publisher


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A receiver wants the current weights before its first ticket."""

    protocol: int
    run_id: str
    name: str


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """The manifest fits the engine's model."""

    name: str
    update_id: int


class Verified(msgspec.Struct, frozen=True, kw_only=True, tag="verified"):
    """All bytes are there and their checksums agree."""

    name: str
    update_id: int


class CommittedUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="committed_update"):
    """The engine samples from ``version`` now; ``paused_s`` is how long it stood still."""

    name: str
    update_id: int
    version: int
    paused_s: float


class FailedUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="failed_update"):
    """A phase failed at this receiver."""

    name: str
    update_id: int
    phase: str
    reason: str


ToReceiver = Prepare | Transfer | CommitUpdate | Abort
ToPublisher = Join | Prepared | Verified | CommittedUpdate | FailedUpdate
