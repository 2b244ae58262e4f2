"""Weights of a model under Megatron-core: read from a Hugging Face folder by slices, and given back one whole tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import DataError
from asyncrl.learner.megatron.names import Entry, FileTensor, entries
from asyncrl.learner.megatron.parallel import Parallel

__all__ = ["export_tensors", "load_weights", "own_parameters", "ties"]

_SEED = 0  # of a value head that a folder does not have: every rank starts from the same


def own_parameters(
    chunks: Sequence[torch.nn.Module], config: Any, parallel: Parallel, *, value_head: bool
) -> list[tuple[Entry, torch.nn.Parameter]]:
    """This rank's parameters, each with its place in the table.

    Raises:
        AssertionError: a chunk has a parameter that the table does not know.
    """
    named = [dict(chunk.named_parameters()) for chunk in chunks]
    found = [
        (entry, named[entry.chunk].pop(entry.name))
        for entry in entries(config, parallel.layout, value_head=value_head)
        if entry.is_on(parallel)
    ]
    assert not any(named), f"the table of weights lacks {[sorted(left) for left in named]}"
    return found


def ties(config: Any, *, value_head: bool) -> dict[str, str]:
    """Tied names that an export leaves out, each with the name that carries it."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings and not value_head else {}


@torch.no_grad()
def load_weights(chunks: Sequence[torch.nn.Module], model_dir: str, config: Any, parallel: Parallel, *, value_head: bool) -> None:
    """Fills this rank's parameters from the safetensors files of a folder, reading no more than they take.

    A value head that the folder does not have is drawn as transformers draws it.

    Raises:
        DataError: a tensor is missing, is one too many, or has another shape; names the first.
    """
    files = _files(Path(model_dir))
    _check_names(files, Path(model_dir), config, parallel, value_head)
    with ExitStack() as stack:
        read = _Reader(files, stack)
        for entry, parameter in own_parameters(chunks, config, parallel, value_head=value_head):
            if entry.files[0].name not in files:
                parameter.copy_(_drawn(parameter, config.initializer_range))
            else:
                boxes = entry.boxes(parallel.tensor_rank)
                parameter.copy_(entry.mixed([read(file, box) for file, box in zip(entry.files, boxes, strict=True)]))


class _Reader:
    """Slices of tensors in safetensors files, each file opened once."""

    def __init__(self, files: Mapping[str, Path], stack: ExitStack) -> None:
        self._files, self._stack = files, stack
        self._opened: dict[Path, Any] = {}

    def __call__(self, file: FileTensor, box: tuple[slice, ...]) -> torch.Tensor:
        """A part of a file tensor."""
        path = self._files[file.name]
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(_open(path))
        whole = self._opened[path].get_slice(file.name)
        if tuple(whole.get_shape()) != file.shape:
            raise DataError(
                f"{file.name} has the shape {file.shape} by config.json; met {tuple(whole.get_shape())} in {path}: use the config.json "
                "that was written with the weights"
            )
        if any(part.start == part.stop for part in box):
            return torch.empty([part.stop - part.start for part in box])
        tensor: torch.Tensor = whole[box]
        return tensor


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(str(path), framework="pt")


def _files(folder: Path) -> dict[str, Path]:
    """Which file of a folder holds a tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise DataError(
            f"learner.engine=megatron reads safetensors files; {folder} has no model.safetensors: save the model as safetensors"
        )
    with _open(single) as opened:
        return dict.fromkeys(opened.keys(), single)


def _check_names(files: Mapping[str, Path], folder: Path, config: Any, parallel: Parallel, value_head: bool) -> None:
    wanted = {file.name for entry in entries(config, parallel.layout, value_head=value_head) for file in entry.files}
    missing = sorted(name for name in wanted - files.keys() if not name.startswith("score."))
    spare = {name for name in files if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")}
    others = sorted(files.keys() - wanted - spare)  # a tied head, one beside a value head, and positions of old files may lie there
    if missing:
        raise DataError(f"{folder} lacks {len(missing)} of {len(wanted)} tensors of {config.model_type}, {missing[0]} first")
    if others:
        raise DataError(
            f"{folder} has {len(others)} tensors that {config.model_type} has no place for, {others[0]} first: use learner.engine=fsdp2"
        )


def _drawn(parameter: torch.Tensor, deviation: float) -> torch.Tensor:
    if parameter.ndim == 1:
        return torch.zeros_like(parameter)
    return torch.empty(parameter.shape).normal_(0.0, deviation, generator=torch.Generator().manual_seed(_SEED))


def export_tensors(
    chunks: Sequence[torch.nn.Module],
    config: Any,
    parallel: Parallel,
    *,
    value_head: bool,
    dtype: torch.dtype,
    value: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole model's tensors under the names of its files, in ``dtype``, tied ones once, one after the other; collective.

    Every rank gets every tensor, and must drain it.

    Args:
        value: what to export of a parameter, itself for example; called for each of this rank's own, in the same order on all ranks.
    """
    own = {(entry.chunk, entry.name): parameter for entry, parameter in own_parameters(chunks, config, parallel, value_head=value_head)}
    device = next(iter(own.values())).device
    for entry in entries(config, parallel.layout, value_head=value_head):
        if entry.copy:
            continue
        if entry.is_on(parallel):
            local = value(own[entry.chunk, entry.name]).to(device=device, dtype=dtype).contiguous()
        else:
            local = torch.empty(entry.shape, dtype=dtype, device=device)
        if entry.expert_rank is not None and entry.stage == parallel.stage:
            _spread(local, entry.expert_rank, parallel.expert_group)
        _spread(local, entry.stage, parallel.pipeline_group)
        for file, tensor in zip(entry.files, _joined(local, entry, parallel.tensor_group), strict=True):
            yield file.name, tensor.contiguous()


def _spread(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.broadcast(tensor, group=group, group_src=rank)


def _joined(local: torch.Tensor, entry: Entry, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The whole file tensors of a parameter, from all tensor ranks."""
    if entry.cut is None or group.size() == 1:
        return entry.unmixed(local, 0)
    blocks = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(blocks, local, group=group)
    of_ranks = [entry.unmixed(block, rank) for rank, block in enumerate(blocks)]
    return [torch.cat(parts, dim=entry.cut) for parts in zip(*of_ranks, strict=True)]
