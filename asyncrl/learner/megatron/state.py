"""Checkpoint of a Megatron engine: weights, Adam moments, schedule and RNG as one flat DCP state that no layout is left in.

Parts of tensors are described by Megatron-core's dist_checkpointing and written by torch's own writer in a thread, for Megatron-core's
asynchronous one forks the process that trains. Of ranks that hold the same, one writes; float32 masters are what is kept.
Keys are those of :mod:`asyncrl.learner.state_files`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from asyncrl.learner.megatron.masters import Masters
from asyncrl.learner.megatron.names import Entry, entries
from asyncrl.learner.megatron.parallel import Parallel
from asyncrl.learner.megatron.shards import Shard, compose, decompose, sharded, shards_of
from asyncrl.learner.megatron.weights import own_parameters
from asyncrl.learner.state_files import ThreadSaving, check_fits, known_entries, no_checksums, restore_rng, rng_states, saved_ranks

__all__ = ["MegatronState", "load_state", "own_copies", "save_state"]

_KINDS = {"weight": "model", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # of what is kept of a parameter: how its keys begin


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronState:
    """What is saved.

    Attributes:
        chunks: bare, of this rank; config: the model's own; parallel: this rank's place; value_head: whether the model has one;
        masters: float32 weights and moments; optimizer_steps: the schedule's place; group: all ranks, over gloo, for nothing else.
    """

    chunks: list[Any]
    config: Any
    parallel: Parallel
    value_head: bool
    masters: Masters
    optimizer_steps: int
    group: dist.ProcessGroup

    def parameters(self) -> list[tuple[Entry, torch.nn.Parameter]]:
        """This rank's, in the order of the table."""
        return own_parameters(self.chunks, self.config, self.parallel, value_head=self.value_head)


def save_state(state: MegatronState, folder: Path, synced: bool) -> ThreadSaving:
    """Copies the state and begins to write it; collective. Unless ``synced`` it may not be on the disk when it is done."""
    tensors = own_copies(state)
    tensors |= {key: value.clone() for key, value in rng_states().items()}

    def write() -> None:
        with no_checksums():
            save(tensors, storage_writer=FileSystemWriter(str(folder), sync_files=synced), process_group=state.group)

    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    saving = ThreadSaving(writer.submit(write))
    writer.shutdown(wait=False)
    return saving


def own_copies(state: MegatronState) -> dict[str, Any]:
    """What this rank writes, as DCP takes it, on the CPU and apart from the originals: training goes on while it is written. Collective."""
    rank, parts, scalars = state.parallel.tensor_rank, _Parts(), {"optimizer_steps": torch.tensor(state.optimizer_steps)}
    for index, (entry, parameter) in enumerate(state.parameters()):
        writes = _writes(entry, index, state.parallel)
        for kind in _KINDS:
            whole = state.masters.gather(parameter, kind)
            for shard, part in zip(shards_of(entry, rank), decompose(entry, whole, rank), strict=True) if writes else ():
                parts.add(kind, shard, part.detach().to("cpu", copy=True).contiguous())
        if not writes:
            continue
        scalars |= {f"adam_step.{shard.name}": torch.tensor(float(state.optimizer_steps)) for shard in shards_of(entry, rank)}
    return parts.tensors() | scalars


def load_state(state: MegatronState, folder: Path) -> int:
    """Reads model, optimizer and RNG in place; returns the optimizer steps they contain. Collective.

    RNG states only come back to as many ranks as wrote them.

    Raises:
        DataError: another model's; see :func:`~asyncrl.learner.state_files.check_fits`. Nothing is read then.
    """
    known = known_entries(folder)
    check_fits(_whole_model(state), known, folder)
    steps = {"optimizer_steps": torch.tensor(0)}
    rng = rng_states() if saved_ranks(known) == state.parallel.layout.ranks else {}
    rng = {key: value for key, value in rng.items() if key in known}
    parts = _Parts()
    read = [(entry, parameter, _empty(parts, entry, state.parallel.tensor_rank)) for entry, parameter in state.parameters()]
    load(parts.tensors() | steps | rng, checkpoint_id=str(folder), process_group=state.group)
    done = int(steps["optimizer_steps"].item())
    for entry, parameter, values in read:
        state.masters.set(parameter, {kind: compose(entry, values[kind]) for kind in _KINDS}, done)
    restore_rng(rng)
    return done


class _Parts:
    """Parts of whole tensors, gathered by key."""

    def __init__(self) -> None:
        self._of: dict[str, list[tuple[Shard, torch.Tensor]]] = {}

    def add(self, kind: str, shard: Shard, tensor: torch.Tensor) -> None:
        """One part; empty ones are left out."""
        if tensor.numel():
            self._of.setdefault(f"{_KINDS[kind]}.{shard.name}", []).append((shard, tensor))

    def tensors(self) -> dict[str, Any]:
        """As DCP takes them."""
        return {key: sharded(key, parts) for key, parts in self._of.items()}


def _writes(entry: Entry, index: int, parallel: Parallel) -> bool:
    """Whether this rank is the one that writes a parameter, or its part of it, of all that hold the same; they take turns."""
    if entry.copy or (entry.expert is None and entry.cut is None and parallel.tensor_rank > 0):
        return False
    group = parallel.copies_of_expert if entry.expert is not None else parallel.copies
    return index % group.size() == group.rank()


def _empty(parts: _Parts, entry: Entry, rank: int) -> dict[str, list[torch.Tensor]]:
    """Room for a parameter and its moments, which is filled in place when what is in ``parts`` is read."""
    room = {kind: [torch.empty(shard.sizes) for shard in shards_of(entry, rank)] for kind in _KINDS}
    for kind, tensors in room.items():
        for shard, tensor in zip(shards_of(entry, rank), tensors, strict=True):
            parts.add(kind, shard, tensor)
    return room


def _whole_model(state: MegatronState) -> dict[str, torch.Tensor]:
    """Shapes of all that a checkpoint of this model holds, as tensors without data."""
    shapes = {"optimizer_steps": torch.empty((), device="meta")}
    for shard in _all_shards(state):
        whole = torch.empty(shard.shape, device="meta")
        shapes |= {f"{prefix}.{shard.name}": whole for prefix in _KINDS.values()}
        shapes[f"adam_step.{shard.name}"] = shapes["optimizer_steps"]
    return shapes


def _all_shards(state: MegatronState) -> Iterator[Shard]:
    for entry in entries(state.config, state.parallel.layout, value_head=state.value_head):
        yield from shards_of(entry, 0)
