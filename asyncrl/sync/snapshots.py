"""From the learner's tensors to the manifest of an update: casting, ties, and the fingerprint that shows a change."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from asyncrl.config import Config
from asyncrl.config.run_dir import RunFacts
from asyncrl.errors import SyncError
from asyncrl.sync.messages import UpdateManifest
from asyncrl.sync.transports import Snapshot

if TYPE_CHECKING:
    import torch

__all__ = ["cast_for_engine", "fingerprint", "new_manifest"]


def cast_for_engine(tensors: Iterable[tuple[str, torch.Tensor]], dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point tensors in ``dtype`` (a torch dtype's name), the precision that the engine computes in; others as they are."""
    import torch

    target = getattr(torch, dtype)
    for name, tensor in tensors:
        yield name, (tensor.detach().to(target) if tensor.is_floating_point() else tensor.detach())


def new_manifest(
    config: Config, facts: RunFacts, snapshot: Snapshot, *, update_id: int, version: int, ties: dict[str, str]
) -> UpdateManifest:
    """Everything that a receiver needs to know of a snapshot.

    Raises:
        SyncError: no tensors, a tied name that is sent too, or a tie to a name that is not sent.
    """
    sent = {spec.name for spec in snapshot.tensors}
    if not sent:
        raise SyncError(f"version {version} has no tensors: nothing to publish", policy_version=version)
    doubled, dangling = sorted(sent & ties.keys()), sorted(set(ties.values()) - sent)
    if doubled or dangling:
        raise SyncError(
            f"a tied tensor is sent once, under the name it is tied to; met tied names that are sent {doubled} "
            f"and ties to names that are not sent {dangling}",
            policy_version=version,
        )
    return UpdateManifest(
        update_id=update_id,
        incarnation=facts.incarnation,
        version=version,
        transport=config.sync.transport,
        location=snapshot.location,
        total_bytes=snapshot.total_bytes,
        tensors=snapshot.tensors,
        ties=dict(ties),
        in_flight=config.sync.in_flight,
        hold=config.queue.schedule == "lockstep",
    )


def fingerprint(manifest: UpdateManifest) -> int:
    """CRC-32 over every name and checksum: equal for two updates whose tensors are equal."""
    value = 0
    for spec in manifest.tensors:
        value = zlib.crc32(f"{spec.name}:{spec.checksum};".encode(), value)
    return value
