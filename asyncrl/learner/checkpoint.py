"""Checkpoints of a run: ``checkpoints/step-NNNNNN`` with the engine's files and, written last, ``manifest.json``.

A folder without a manifest does not count: it is what a death in mid-write leaves behind. The manifest holds the queue's frontier
that belongs to these weights; restoring both together loses nothing and trains nothing twice.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.run_dir import RunDir, write_atomic
from asyncrl.errors import DataError, PeerTimeout
from asyncrl.learner.control import Control
from asyncrl.learner.engine import Engine, Saving
from asyncrl.queue.messages import Frontier

__all__ = ["CheckpointWriter", "Manifest", "checkpoint_folder", "package_versions", "prune", "read_manifest"]

log = logging.getLogger(__name__)
SAY_EVERY_S = 10.0
_PACKAGES = ("asyncrl", "torch", "transformers", "megatron-core")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says about itself.

    ``step``: training steps in the weights; ``frontier``: what the queue has settled for good at that step.
    """

    run_id: str
    step: int
    incarnation: int
    frontier: Frontier
    engine: str
    world_size: int
    dtype: str
    versions: Mapping[str, str]


def checkpoint_folder(run_dir: RunDir, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir.checkpoints / f"step-{step:06d}"


class CheckpointWriter:
    """Writes checkpoints beside training, one at a time; all methods are collective.

    Args:
        engine, control: of this rank; run_dir: where they go; keep: how many whole ones stay.
    """

    def __init__(self, engine: Engine, control: Control, run_dir: RunDir, keep: int) -> None:
        self._engine = engine
        self._control = control
        self._run_dir = run_dir
        self._keep = keep
        self._begun: tuple[Manifest, Saving, float] | None = None

    def begin(self, manifest: Manifest, synced: bool = True) -> None:
        """Copies the state of ``manifest.step`` and begins to write it; waits for the one before.

        Unless ``synced`` it survives the process, but no power cut in the next seconds.
        """
        self.finish(wait=True)
        folder = checkpoint_folder(self._run_dir, manifest.step)
        log.info("saving the checkpoint of step %d", manifest.step)
        if self._control.is_leader:
            if folder.exists() and not (folder / "manifest.json").exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
        self._control.barrier()  # nobody writes before the folder is there
        started_s = time.monotonic()
        self._begun = (manifest, self._engine.save(folder, synced), started_s)

    def finish(self, *, wait: bool) -> Path | None:
        """Makes what was begun a whole checkpoint, its manifest last, and removes all but the newest.

        Returns None where nothing was begun, or, unless ``wait``, while some rank still writes.

        Raises:
            PeerTimeout: it is not written as long after the wait began as ranks wait for each other.
        """
        if self._begun is None:
            return None
        manifest, saving, started_s = self._begun
        if not wait and self._control.any(not saving.done()):
            return None
        self._await(saving, manifest.step)
        self._begun = None
        folder = checkpoint_folder(self._run_dir, manifest.step)
        self._control.barrier()  # the manifest comes after the last shard
        if self._control.is_leader:
            write_atomic(folder / "manifest.json", json.dumps(msgspec.to_builtins(manifest, str_keys=True), indent=1))
            prune(self._run_dir, self._keep)
        self._control.barrier()
        log.info("saved %s in %.2f s", folder.name, time.monotonic() - started_s)
        return folder

    def _await(self, saving: Saving, step: int) -> None:
        started_s = time.monotonic()
        while not saving.wait(SAY_EVERY_S):
            waited_s = time.monotonic() - started_s
            if waited_s > self._control.timeout_s:
                raise PeerTimeout(
                    f"a checkpoint is written within launch.stall_timeout_s = {self._control.timeout_s:.0f} s; that of step {step} is not"
                )
            log.info("waiting %.0f s for the disk to take the checkpoint of step %d", waited_s, step)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        DataError: there is none, or it is not readable.
    """
    file = folder / "manifest.json"
    if not file.is_file():
        raise DataError(f"{folder} is not a whole checkpoint: manifest.json is missing; start from an older one")
    try:
        return msgspec.json.decode(file.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DataError(f"{file} is not a manifest: {error}") from error


def prune(run_dir: RunDir, keep: int) -> None:
    """Removes whole checkpoints but the newest ``keep``; the manifest goes first, so that a half-removed one does not count."""
    whole = sorted(file.parent for file in run_dir.checkpoints.glob("step-*/manifest.json"))
    for folder in whole[:-keep]:
        (folder / "manifest.json").unlink()
        shutil.rmtree(folder)


def package_versions() -> dict[str, Any]:
    """Versions of the packages that wrote a checkpoint."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
