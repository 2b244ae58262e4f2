"""The verify phase: every byte of an update is read and checked."""

from __future__ import annotations

import zlib

from asyncrl.errors import SyncError
from asyncrl.sync.messages import UpdateManifest
from asyncrl.sync.transports import open_update

__all__ = ["verify_checksums"]


def verify_checksums(manifest: UpdateManifest) -> None:
    """Reads every byte of an update and compares the CRC-32 of each tensor.

    Raises:
        SyncError: the snapshot cannot be opened, or a tensor's checksum differs, naming it.
    """
    with open_update(manifest) as tensors:
        for spec, view in tensors:
            found = zlib.crc32(view)
            if found != spec.checksum:
                raise SyncError(
                    f"checksum of {spec.name} in version {manifest.version} is {spec.checksum:08x}; met {found:08x}: "
                    "it is sent again after a join",
                    policy_version=manifest.version,
                )
