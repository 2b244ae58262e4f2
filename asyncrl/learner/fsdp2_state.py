"""Checkpoint of an FSDP2 engine as one flat torch DCP state: weights, Adam moments, schedule and RNG, each a tensor under a speaking key.

Keys: ``model.NAME`` with NAME of the loaded model, ``adapter.NAME``, ``exp_avg.NAME``, ``exp_avg_sq.NAME``, ``adam_step.NAME``,
``optimizer_steps``, ``rng.R`` and ``rng_cuda.R`` of rank R. Weights that are not trained are not in it. Shards are laid out again for
other layouts and numbers of ranks; RNG states only come back to as many ranks as wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.tensor import DTensor

from asyncrl.errors import DataError
from asyncrl.learner.adapters import is_adapter

__all__ = ["WEIGHTS", "EngineState", "check_fits", "load_state", "save_state", "trained_parameters", "weight_key"]

WEIGHTS = ("model.", "adapter.")  # how keys of weights begin, which are all that an export reads
_RNG = ("rng.", "rng_cuda.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What is saved: the sharded model, its optimizer, the schedule's place; ``group``: all ranks, over gloo, for nothing else."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    optimizer_steps: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class _Saving:
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


def save_state(state: EngineState, folder: Path, synced: bool) -> _Saving:
    """Copies the state and begins to write the DCP files; collective. Unless ``synced`` they may not be on the disk when it is done."""
    tensors = {key: _copy(value) for key, value in (_tensors(state) | _rng()).items()}
    checksums = torch.serialization.get_crc32_options()
    # zip's checksum is more than half the time of a save, and a stop has seconds
    torch.serialization.set_crc32_options(False)
    begun: Any = async_save(
        tensors,
        storage_writer=FileSystemWriter(str(folder), sync_files=synced),
        process_group=state.group,
        async_checkpointer_type=AsyncCheckpointerType.THREAD,
    )
    done: Future[Any] = getattr(begun, "upload_completion", begun)
    done.add_done_callback(lambda _: torch.serialization.set_crc32_options(checksums))
    return _Saving(done)


def load_state(state: EngineState, folder: Path) -> int:
    """Reads model, optimizer and RNG in place; returns the optimizer steps they contain. Collective.

    Raises:
        DataError: adapters of another rank or of none, or another model; see :func:`check_fits`. Nothing is read then.
    """
    tensors = _tensors(state)
    known = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    check_fits(tensors, {key: entry for key, entry in known.items() if not key.startswith(_RNG)}, folder)
    ranks = sum(1 for key in known if key.startswith("rng."))
    rng = _rng() if ranks == dist.get_world_size() else {}
    rng = {key: value for key, value in rng.items() if key in known}
    load(tensors | rng, checkpoint_id=str(folder), process_group=state.group)
    for name, parameter in trained_parameters(state.model):
        state.optimizer.state[parameter] = {
            "step": tensors[f"adam_step.{name}"],
            "exp_avg": tensors[f"exp_avg.{name}"],
            "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
        }
    for key, value in rng.items():
        (torch.cuda.set_rng_state if key.startswith("rng_cuda.") else torch.set_rng_state)(value)
    return int(tensors["optimizer_steps"].item())


def weight_key(name: str) -> str:
    """Where a parameter's weight is kept."""
    return f"adapter.{name}" if is_adapter(name) else f"model.{name}"


def check_fits(tensors: Mapping[str, torch.Tensor], known: Mapping[str, Any], folder: Path) -> None:
    """Compares what is to be read with what a checkpoint holds, by key; ``known`` is its metadata.

    torch itself reads what two models share in silence, and of a shape that differs it does not say whose.

    Raises:
        DataError: a tensor is missing, is one too many, or has another shape; names the first.
    """
    remedy = "use the model and the learner.lora_rank that wrote it"
    missing, others = sorted(tensors.keys() - known.keys()), sorted(known.keys() - tensors.keys())
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


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """What a checkpoint keeps of a model; what stays as it was is in the model's own folder."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _tensors(state: EngineState) -> dict[str, Any]:
    tensors: dict[str, Any] = {"optimizer_steps": torch.tensor(state.optimizer_steps)}
    for name, parameter in trained_parameters(state.model):
        moments = state.optimizer.state.get(parameter) or _fresh_moments(parameter)
        tensors[weight_key(name)] = parameter.detach()
        tensors[f"exp_avg.{name}"] = moments["exp_avg"]
        tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        tensors[f"adam_step.{name}"] = moments["step"]
    return tensors


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU and apart from the original: training goes on while it is written."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    shard = tensor.to_local().detach().to("cpu", copy=True)
    return DTensor.from_local(shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _fresh_moments(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    weight = parameter.detach()
    step = torch.zeros((), dtype=torch.float32, device=weight.device)
    return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight), "step": step}


def _rng() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    states = {f"rng.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng_cuda.{rank}"] = torch.cuda.get_rng_state()
    return states
