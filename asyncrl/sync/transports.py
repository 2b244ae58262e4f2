"""How the bytes of a snapshot travel: the protocol of a transport and the registry that finds one by name.

The write side lives in the publisher, the read side wherever the tensors are wanted (in the vLLM worker process):
it gets nothing but the manifest. What is written is raw bytes, so that a dtype without a numpy name (bfloat16) passes.

Source: design note, section 6.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import ConfigError
from asyncrl.sync.messages import TensorSpec, UpdateManifest

if TYPE_CHECKING:
    import torch

__all__ = ["Snapshot", "Transport", "new_transport", "open_update", "register", "transport_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One version laid out for travel: where it is, how long it is, and what lies in it."""

    location: str
    total_bytes: int
    tensors: tuple[TensorSpec, ...]


class Transport(Protocol):
    """Write side of one transport; read side as ``open``."""

    name: str

    def write(self, update_id: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
        """Copies every tensor and checksums it; returns when the snapshot stands by itself."""

    def release(self, location: str) -> None:
        """Frees a snapshot; a reader that has it open keeps its view."""

    def close(self) -> None:
        """Frees everything that this run has written, leftovers of a killed publisher too."""


Opened = AbstractContextManager[Iterator[tuple[TensorSpec, memoryview]]]
_factories: dict[str, Callable[[RunFacts, RunDir], Transport]] = {}
_readers: dict[str, Callable[[UpdateManifest], Opened]] = {}
_modules = {"file": "asyncrl.sync.file", "shm": "asyncrl.sync.shm"}


def register(name: str, factory: Callable[[RunFacts, RunDir], Transport], reader: Callable[[UpdateManifest], Opened]) -> None:
    """Registers both sides of a transport; called by its module at import."""
    _factories[name], _readers[name] = factory, reader


def transport_names() -> list[str]:
    """Names that ``sync.transport`` may have."""
    return sorted(_modules)


def new_transport(name: str, facts: RunFacts, run_dir: RunDir) -> Transport:
    """Write side by name.

    Raises:
        ConfigError: unknown name, with the valid ones.
    """
    _load(name)
    return _factories[name](facts, run_dir)


def open_update(manifest: UpdateManifest) -> Opened:
    """Read side: a context manager that yields each tensor's spec with a view of its bytes, valid inside the context.

    Raises:
        ConfigError: unknown transport.
        SyncError: the snapshot is gone or shorter than the manifest says.
    """
    _load(manifest.transport)
    return _readers[manifest.transport](manifest)


def _load(name: str) -> None:
    if name not in _modules:
        raise ConfigError(f"sync.transport is one of {', '.join(transport_names())}; met {name!r}")
    importlib.import_module(_modules[name])
