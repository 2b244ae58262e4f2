"""Snapshots as one memory-mapped segment each: what the shared-memory and the file transport have in common.

A segment is written front to back through a file descriptor, so that nothing has to be known of its size beforehand, under a
temporary name; it appears under its own name when it is whole. Readers map it privately: no copy, no resource tracker.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.errors import SyncError
from asyncrl.sync.messages import TensorSpec, UpdateManifest
from asyncrl.sync.transports import Snapshot

if TYPE_CHECKING:
    import torch

__all__ = ["Segments", "open_segment"]

ALIGNMENT_BYTES = 64


class Segments:
    """Write side of a transport whose snapshots are segments in one folder.

    Args:
        name: of the transport.
        folder: where segments lie; made when missing.
        owner: begins the name of every segment of the run; a dot ends it, so that no other run's names begin alike.
        incarnation: of the publisher; distinguishes its segments from leftovers.
    """

    def __init__(self, name: str, folder: Path, owner: str, incarnation: int) -> None:
        self.name = name
        self._folder = folder
        self._owner = re.sub(r"[^A-Za-z0-9_-]", "_", owner)
        self._incarnation = incarnation
        folder.mkdir(parents=True, exist_ok=True)
        self.close()

    def write(self, update_id: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
        """Copies every tensor into a new segment and checksums it.

        Raises:
            SyncError: two tensors of one name, or the segment cannot be written (disk or memory full).
        """
        path = self._folder / f"{self._owner}.{self._incarnation}.{update_id}"
        part = path.with_name(f"{path.name}.part")
        try:
            with part.open("wb", buffering=0) as file:
                specs = tuple(_append(file.fileno(), tensors))
                total_bytes = os.lseek(file.fileno(), 0, os.SEEK_CUR)
            os.replace(part, path)
        except OSError as error:
            raise SyncError(f"a snapshot could not be written to {path}: {error}; free space there or change sync.transport") from error
        finally:
            part.unlink(missing_ok=True)
        return Snapshot(location=str(path), total_bytes=total_bytes, tensors=specs)

    def release(self, location: str) -> None:
        """Removes the segment's name; its memory goes with the last reader."""
        Path(location).unlink(missing_ok=True)

    def close(self) -> None:
        """Removes every segment of this run."""
        for path in self._folder.glob(f"{self._owner}.*"):
            path.unlink(missing_ok=True)


def _append(descriptor: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[TensorSpec]:
    offset, seen = 0, set[str]()
    for name, tensor in tensors:
        if name in seen:
            raise SyncError(f"each tensor is published once; met {name} twice: send a tied one under one name and list the tie")
        seen.add(name)
        data = _raw_bytes(tensor)
        _write_all(descriptor, data)
        padding = -len(data) % ALIGNMENT_BYTES
        _write_all(descriptor, memoryview(bytes(padding)))
        yield TensorSpec(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=offset,
            num_bytes=len(data),
            checksum=zlib.crc32(data),
        )
        offset += len(data) + padding


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(b"") if flat.numel() == 0 else flat.view(torch.uint8).numpy().data.cast("B")


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def open_segment(manifest: UpdateManifest) -> Iterator[Iterator[tuple[TensorSpec, memoryview]]]:
    """Maps a segment for reading; the views live as long as the context.

    Raises:
        SyncError: the segment is gone, or shorter than the manifest says.
    """
    try:
        with open(manifest.location, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.total_bytes or size == 0:
                raise SyncError(
                    f"segment {manifest.location} has {size} bytes; its manifest says {manifest.total_bytes}",
                    policy_version=manifest.version,
                )
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise SyncError(
            f"segment {manifest.location} of version {manifest.version} cannot be opened: {error}; "
            "publisher and receiver share this folder on one host",
            policy_version=manifest.version,
        ) from error
    try:
        whole = memoryview(mapped)
        yield ((spec, whole[spec.offset : spec.offset + spec.num_bytes]) for spec in manifest.tensors)
    finally:
        # views handed to tensors keep the map alive until the last of them is gone
        del whole
        with contextlib.suppress(BufferError):
            mapped.close()
