"""Checkpoint of an FSDP2 engine as one flat torch DCP state: weights, Adam moments, schedule and RNG, each a tensor under a speaking key.

Keys are those of :mod:`asyncrl.learner.state_files`. Shards are laid out again for other layouts and numbers of ranks; RNG states only
come back to as many ranks as wrote them.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.tensor import DTensor

from asyncrl.learner.adapters import is_adapter
from asyncrl.learner.state_files import ThreadSaving, check_fits, known_entries, no_checksums, restore_rng, rng_states, saved_ranks

__all__ = ["EngineState", "load_state", "save_state", "trained_parameters", "weight_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What is saved: the sharded model, its optimizer, the schedule's place; ``group``: all ranks, over gloo, for nothing else."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    optimizer_steps: int
    group: dist.ProcessGroup


def save_state(state: EngineState, folder: Path, synced: bool) -> ThreadSaving:
    """Copies the state and begins to write the DCP files; collective. Unless ``synced`` they may not be on the disk when it is done."""
    tensors = {key: _copy(value) for key, value in (_tensors(state) | rng_states()).items()}
    checksums = ExitStack()
    checksums.enter_context(no_checksums())
    begun: Any = async_save(
        tensors,
        storage_writer=FileSystemWriter(str(folder), sync_files=synced),
        process_group=state.group,
        async_checkpointer_type=AsyncCheckpointerType.THREAD,
    )
    done: Future[Any] = getattr(begun, "upload_completion", begun)
    done.add_done_callback(lambda _: checksums.close())
    return ThreadSaving(done)


def load_state(state: EngineState, folder: Path) -> int:
    """Reads model, optimizer and RNG in place; returns the optimizer steps they contain. Collective.

    Raises:
        DataError: adapters of another rank or of none, or another model; see :func:`check_fits`. Nothing is read then.
    """
    tensors, known = _tensors(state), known_entries(folder)
    check_fits(tensors, known, folder)
    rng = rng_states() if saved_ranks(known) == dist.get_world_size() else {}
    rng = {key: value for key, value in rng.items() if key in known}
    load(tensors | rng, checkpoint_id=str(folder), process_group=state.group)
    for name, parameter in trained_parameters(state.model):
        state.optimizer.state[parameter] = {
            "step": tensors[f"adam_step.{name}"],
            "exp_avg": tensors[f"exp_avg.{name}"],
            "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
        }
    restore_rng(rng)
    return int(tensors["optimizer_steps"].item())


def weight_key(name: str) -> str:
    """Where a parameter's weight is kept."""
    return f"adapter.{name}" if is_adapter(name) else f"model.{name}"


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
