"""Checkpoint of an FSDP2 engine as one flat torch DCP state: weights, Adam moments, schedule and RNG, each a tensor under a speaking key.

Keys: ``model.NAME`` with NAME of Hugging Face, ``exp_avg.NAME``, ``exp_avg_sq.NAME``, ``adam_step.NAME``, ``optimizer_steps``,
``rng.R`` and ``rng_cuda.R`` of rank R. Shards are laid out again for another number of ranks; RNG states only come back to as
many ranks as wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["EngineState", "load_state", "save_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What is saved: the sharded model, its optimizer, and the schedule's place."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    optimizer_steps: int


def save_state(state: EngineState, folder: Path, synced: bool) -> None:
    """Writes the DCP files; collective. Unless ``synced`` they may still be on their way to the disk."""
    tensors = _tensors(state) | _rng()
    checksums = torch.serialization.get_crc32_options()
    # zip's checksum is more than half the time of a save, and a stop has seconds
    torch.serialization.set_crc32_options(False)
    try:
        save(tensors, storage_writer=FileSystemWriter(str(folder), sync_files=synced))
    finally:
        torch.serialization.set_crc32_options(checksums)


def load_state(state: EngineState, folder: Path) -> int:
    """Reads model, optimizer and RNG in place; returns the optimizer steps they contain. Collective."""
    tensors = _tensors(state)
    known = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    ranks = sum(1 for key in known if key.startswith("rng."))
    rng = _rng() if ranks == dist.get_world_size() else {}
    rng = {key: value for key, value in rng.items() if key in known}
    load(tensors | rng, checkpoint_id=str(folder))
    for name, parameter in state.model.named_parameters():
        state.optimizer.state[parameter] = {
            "step": tensors[f"adam_step.{name}"],
            "exp_avg": tensors[f"exp_avg.{name}"],
            "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
        }
    for key, value in rng.items():
        (torch.cuda.set_rng_state if key.startswith("rng_cuda.") else torch.set_rng_state)(value)
    return int(tensors["optimizer_steps"].item())


def _tensors(state: EngineState) -> dict[str, Any]:
    tensors: dict[str, Any] = {"optimizer_steps": torch.tensor(state.optimizer_steps)}
    for name, parameter in state.model.named_parameters():
        moments = state.optimizer.state.get(parameter) or _fresh_moments(parameter)
        tensors[f"model.{name}"] = parameter.detach()
        tensors[f"exp_avg.{name}"] = moments["exp_avg"]
        tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        tensors[f"adam_step.{name}"] = moments["step"]
    return tensors


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
