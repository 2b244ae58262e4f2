"""Where a model's parameters are, and how each is made of file tensors: :mod:`asyncrl.learner.megatron.rows` for one model and layout.

A parameter is made of one or several file tensors, mixed into its first dimension. Tensor ranks cut it so that each of them has a
contiguous part of every file tensor, perhaps an empty one: no rank needs more of a file than it keeps, and parts are joined again in the
order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncrl.learner.megatron.parallel import MegatronLayout, Parallel
from asyncrl.learner.megatron.rows import DENSE, EMBEDDING, EXPERT, HEAD, NORM, OF_FAMILY, ROUTER, TIED_HEAD, VALUE, Mix, Row, sizes

__all__ = ["Entry", "FileTensor", "entries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """One tensor of the files, and its whole shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter of the whole model.

    Attributes:
        stage, chunk: which stage has it, and in which of its chunks; name: what it is called there; files: its file tensors in order.
        cut, mix: see :class:`~asyncrl.learner.megatron.rows.Row`; tensor_ranks: how many cut it; groups: key/value heads of the model.
        expert: which it belongs to, None where to none; experts: how many there are; expert_rank: the only one that has it, None where
        all do; copy: a tied tensor's second, which another entry carries.
    """

    stage: int
    chunk: int
    name: str
    files: tuple[FileTensor, ...]
    cut: int | None
    mix: Mix
    tensor_ranks: int
    groups: int
    experts: int
    expert: int | None = None
    expert_rank: int | None = None
    copy: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter on a rank."""
        parts = [[part.stop - part.start for part in box] for box in self.boxes(0)]
        return sum(part[0] for part in parts), *parts[0][1:]

    def is_on(self, parallel: Parallel) -> bool:
        """Whether that rank has it, or its part of it."""
        return self.stage == parallel.stage and self.expert_rank in (None, parallel.expert_rank)

    def boxes(self, rank: int) -> list[tuple[slice, ...]]:
        """What a tensor rank has of each file tensor."""
        whole = [tuple(slice(0, size) for size in file.shape) for file in self.files]
        if self.cut is None:
            return whole
        rows = [file.shape[self.cut] for file in self.files]
        spans = self._within_group(rows, rank) if self._splits_groups else [_even(size, self.tensor_ranks, rank) for size in rows]
        return [(*box[: self.cut], span, *box[self.cut + 1 :]) for box, span in zip(whole, spans, strict=True)]

    def mixed(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A rank's parameter from its parts of the file tensors.

        Example: two key/value heads of one query each give q0 k0 v0 q1 k1 v1.
        """
        if self.mix is Mix.GROUPED and not self._splits_groups:
            groups = self.groups // self.tensor_ranks
            return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
        return torch.cat(list(parts))

    def unmixed(self, parameter: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """The inverse of :meth:`mixed`, on a tensor rank."""
        sizes = [box[0].stop - box[0].start for box in self.boxes(rank)]
        parts: list[torch.Tensor] = []
        if self.mix is Mix.GROUPED and not self._splits_groups:
            groups = self.groups // self.tensor_ranks
            grouped = parameter.reshape(groups, -1, *parameter.shape[1:])
            for size in sizes:
                start = sum(part.shape[0] for part in parts) // groups
                parts.append(grouped[:, start : start + size // groups].flatten(0, 1))
            return parts
        for size in sizes:
            start = sum(part.shape[0] for part in parts)
            parts.append(parameter[start : start + size])
        return parts

    @property
    def _splits_groups(self) -> bool:
        """Whether there are more tensor ranks than key/value heads: each then has a block of one head's queries, key and value."""
        return self.mix is Mix.GROUPED and self.groups % self.tensor_ranks != 0

    def _within_group(self, rows: Sequence[int], rank: int) -> list[slice]:
        of_group = [size // self.groups for size in rows]
        block = sum(rows) // self.tensor_ranks
        group, start = divmod(rank * block, sum(of_group))
        spans, before = [], 0
        for size in of_group:
            first, last = (min(max(place - before, 0), size) for place in (start, start + block))
            spans.append(slice(group * size + first, group * size + last))
            before += size
        return spans


def _even(size: int, ranks: int, rank: int) -> slice:
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


def entries(config: Any, layout: MegatronLayout, *, value_head: bool) -> Iterator[Entry]:
    """All parameters of a model in the order of its files; the same on every rank."""
    pieces = layout.pipeline * layout.chunks
    first, last = _Place(config, layout, piece=0), _Place(config, layout, piece=pieces - 1)
    yield first.entry(EMBEDDING)
    for layer in range(config.num_hidden_layers):
        yield from _of_layer(config, layout, layer, layers=config.num_hidden_layers // pieces)
    yield last.entry(NORM)
    if value_head:
        yield from map(last.entry, VALUE)
    elif not config.tie_word_embeddings:
        yield last.entry(HEAD)
    elif layout.pipeline > 1:
        yield replace(last.entry(TIED_HEAD), copy=True)


def _of_layer(config: Any, layout: MegatronLayout, layer: int, *, layers: int) -> Iterator[Entry]:
    here, there = f"decoder.layers.{layer % layers}.", f"model.layers.{layer}."
    experts = config.num_experts if config.model_type == "qwen3_moe" else 0
    place = _Place(config, layout, piece=layer // layers)
    for row in (*OF_FAMILY[config.model_type], *(ROUTER if experts else DENSE)):
        yield place.entry(row, here, there)
    each = experts // layout.expert
    for expert in range(experts):
        own, file = f"{here}mlp.experts.local_experts.{expert % each}.", f"{there}mlp.experts.{expert}."
        for row in EXPERT:
            yield replace(place.entry(row, own, file), expert=expert, expert_rank=expert // each)


class _Place:
    """One of the P·V pieces that the layers are cut into: chunk v of stage p is piece p + P·v."""

    def __init__(self, config: Any, layout: MegatronLayout, *, piece: int) -> None:
        self._sizes = sizes(config)
        self._groups = config.num_key_value_heads
        self._layout = layout
        self._piece = piece

    def entry(self, row: Row, here: str = "", there: str = "") -> Entry:
        """A row below a layer's two names."""
        return Entry(
            stage=self._piece % self._layout.pipeline,
            chunk=self._piece // self._layout.pipeline,
            name=here + row.megatron,
            files=tuple(
                FileTensor(name=there + name, shape=tuple(self._sizes[size] for size in dimensions.split()))
                for name, dimensions in row.files
            ),
            cut=row.cut,
            mix=row.mix,
            tensor_ranks=self._layout.tensor,
            groups=self._groups,
            experts=self._sizes["experts"],
        )
