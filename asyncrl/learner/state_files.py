"""What the checkpoints of all engines share: flat DCP states under the same keys, so that one engine continues what another has saved.

Keys: ``model.NAME`` with NAME of the model as transformers loads it, ``adapter.NAME``, ``exp_avg.NAME``, ``exp_avg_sq.NAME``,
``adam_step.NAME``, ``optimizer_steps``, ``rng.R`` and ``rng_cuda.R`` of rank R. Weights that are not trained are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from asyncrl.errors import DataError

__all__ = ["WEIGHTS", "ThreadSaving", "check_fits", "known_entries", "no_checksums", "restore_rng", "rng_states", "saved_ranks"]

WEIGHTS = ("model.", "adapter.")  # how keys of weights begin, which are all that an export reads
_RNG = ("rng.", "rng_cuda.")


@dataclass(frozen=True, slots=True)
class ThreadSaving:
    """A :class:`~asyncrl.learner.engine.Saving` around the thread that writes."""

    future: Future[Any]

    def done(self) -> bool:
        """See the protocol."""
        return self.future.done()

    def wait(self, timeout_s: float) -> bool:
        """See the protocol."""
        if not wait([self.future], timeout=timeout_s).done:
            return False
        self.future.result()
        return True


@contextmanager
def no_checksums() -> Iterator[None]:
    """Without zip's checksum, which is more than half the time of a save; a stop has seconds."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def known_entries(folder: Path) -> dict[str, Any]:
    """The metadata of all that a checkpoint holds, by key."""
    return dict(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)


def saved_ranks(known: Mapping[str, Any]) -> int:
    """How many ranks wrote a checkpoint."""
    return sum(1 for key in known if key.startswith("rng."))


def check_fits(tensors: Mapping[str, torch.Tensor], known: Mapping[str, Any], folder: Path) -> None:
    """Compares what is to be read with what a checkpoint holds, by key; ``known`` is its metadata, of which RNG states do not count.

    torch itself reads what two models share in silence, and of a shape that differs it does not say whose.

    Raises:
        DataError: a tensor is missing, is one too many, or has another shape; names the first.
    """
    remedy = "use the model and the learner.lora_rank that wrote it"
    held = {key for key in known if not key.startswith(_RNG)}
    missing, others = sorted(tensors.keys() - held), sorted(held - tensors.keys())
    if missing:
        raise DataError(
            f"{folder} holds all that this model trains; it lacks {len(missing)} of {len(tensors)} tensors, {missing[0]} first: {remedy}"
        )
    if others:
        raise DataError(f"{folder} holds nothing but what this model trains; met {len(others)} others, {others[0]} first: {remedy}")
    for key, tensor in tensors.items():
        kept = tuple(getattr(known[key], "size", ()))
        if kept != tuple(tensor.shape):
            raise DataError(f"{key} has the shape {tuple(tensor.shape)} in this model; met {kept} in {folder}: {remedy}")


def rng_states() -> dict[str, torch.Tensor]:
    """This rank's generators, each under its key."""
    rank = dist.get_rank()
    states = {f"rng.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng_cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, torch.Tensor]) -> None:
    """Puts back what :func:`rng_states` gave."""
    for key, value in states.items():
        (torch.cuda.set_rng_state if key.startswith("rng_cuda.") else torch.set_rng_state)(value)
