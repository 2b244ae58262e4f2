"""The one table between Megatron-core's parameters and the tensors of Hugging Face files, read both ways.

A parameter is made of one or several file tensors, mixed into its first dimension. Tensor ranks cut it so that each of them has a
contiguous part of every file tensor, perhaps an empty one: no rank needs more of a file than it keeps, and parts are joined again in the
order of ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncrl.learner.megatron.hf_config import head_size
from asyncrl.learner.megatron.parallel import MegatronLayout, Parallel

__all__ = ["Entry", "FileTensor", "Mix", "entries"]


class Mix(enum.Enum):
    """How the parts of a rank become its parameter."""

    ALONE = "one part"
    BEHIND = "one after the other"
    GROUPED = "of each key/value head: its queries, its key, its value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of parameter.

    Attributes:
        megatron: its name, below its layer's; files: names of its file tensors, each with the sizes of its dimensions, which
        :func:`_sizes` tells; cut: the dimension of all of them that tensor ranks cut, None where every rank has them whole; mix: see
        there.
    """

    megatron: str
    files: tuple[tuple[str, str], ...]
    cut: int | None = None
    mix: Mix = Mix.ALONE


def _row(megatron: str, *files: tuple[str, str], cut: int | None = None, mix: Mix = Mix.ALONE) -> Row:
    return Row(megatron=megatron, files=files, cut=cut, mix=mix)


def _qkv(kind: str, behind: str) -> Row:
    parts = (("q", "queries"), ("k", "keys"), ("v", "keys"))
    files = ((f"self_attn.{part}_proj.{kind}", size + behind) for part, size in parts)
    return _row(f"self_attention.linear_qkv.{kind}", *files, cut=0, mix=Mix.GROUPED)


def _gated(size: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("gate_proj.weight", f"{size} hidden"), ("up_proj.weight", f"{size} hidden")


_EMBEDDING = _row("embedding.word_embeddings.weight", ("model.embed_tokens.weight", "vocabulary hidden"), cut=0)
_LAYER = (
    _row("input_layernorm.weight", ("input_layernorm.weight", "hidden")),
    _qkv("weight", " hidden"),
    _row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", "hidden queries"), cut=1),
    _row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", "hidden")),
)
_QK_NORM = tuple(_row(f"self_attention.{part}_layernorm.weight", (f"self_attn.{part}_norm.weight", "head")) for part in "qk")
_DENSE = (
    _row("mlp.linear_fc1.weight", *((f"mlp.{name}", size) for name, size in _gated("inner")), cut=0, mix=Mix.BEHIND),
    _row("mlp.linear_fc2.weight", ("mlp.down_proj.weight", "hidden inner"), cut=1),
)
_ROUTER = (_row("mlp.router.weight", ("mlp.gate.weight", "experts hidden")),)
_EXPERT = (  # whole on its rank
    _row("linear_fc1.weight", *_gated("expert"), mix=Mix.BEHIND),
    _row("linear_fc2.weight", ("down_proj.weight", "hidden expert")),
)
_NORM = _row("decoder.final_layernorm.weight", ("model.norm.weight", "hidden"))
_HEAD = _row("output_layer.weight", ("lm_head.weight", "vocabulary hidden"), cut=0)
_TIED_HEAD = _row("output_layer.weight", *_EMBEDDING.files, cut=0)
_VALUE = (_row("output_layer.weight", ("score.weight", "one hidden")), _row("output_layer.bias", ("score.bias", "one")))

_OF_FAMILY = {"llama": _LAYER, "qwen2": (*_LAYER, _qkv("bias", "")), "qwen3": (*_LAYER, *_QK_NORM), "qwen3_moe": (*_LAYER, *_QK_NORM)}


def _sizes(config: Any) -> dict[str, int]:
    head = head_size(config)
    return {
        "one": 1,
        "vocabulary": config.vocab_size,
        "hidden": config.hidden_size,
        "head": head,
        "queries": config.num_attention_heads * head,
        "keys": config.num_key_value_heads * head,
        "inner": config.intermediate_size,
        "experts": getattr(config, "num_experts", 0),
        "expert": getattr(config, "moe_intermediate_size", 0),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """One tensor of the files, and its whole shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter of the whole model.

    Attributes:
        stage, chunk: which stage has it, and in which of its chunks; name: what it is called there; files: its file tensors in order;
        cut, mix: see :class:`Row`; tensor_ranks: how many cut it; groups: key/value heads of the model; expert_rank: the only one that
        has it, None where all do; copy: a tied tensor's second, which another entry carries.
    """

    stage: int
    chunk: int
    name: str
    files: tuple[FileTensor, ...]
    cut: int | None
    mix: Mix
    tensor_ranks: int
    groups: int
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
    yield first.entry(_EMBEDDING)
    for layer in range(config.num_hidden_layers):
        yield from _of_layer(config, layout, layer, layers=config.num_hidden_layers // pieces)
    yield last.entry(_NORM)
    if value_head:
        yield from map(last.entry, _VALUE)
    elif not config.tie_word_embeddings:
        yield last.entry(_HEAD)
    elif layout.pipeline > 1:
        yield replace(last.entry(_TIED_HEAD), copy=True)


def _of_layer(config: Any, layout: MegatronLayout, layer: int, *, layers: int) -> Iterator[Entry]:
    here, there = f"decoder.layers.{layer % layers}.", f"model.layers.{layer}."
    experts = config.num_experts if config.model_type == "qwen3_moe" else 0
    place = _Place(config, layout, piece=layer // layers)
    for row in (*_OF_FAMILY[config.model_type], *(_ROUTER if experts else _DENSE)):
        yield place.entry(row, here, there)
    each = experts // layout.expert
    for expert in range(experts):
        own, file = f"{here}mlp.experts.local_experts.{expert % each}.", f"{there}mlp.experts.{expert}."
        for row in _EXPERT:
            yield replace(place.entry(row, own, file), expert_rank=expert // each)


class _Place:
    """One of the P·V pieces that the layers are cut into: chunk v of stage p is piece p + P·v."""

    def __init__(self, config: Any, layout: MegatronLayout, *, piece: int) -> None:
        self._sizes = _sizes(config)
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
                FileTensor(name=there + name, shape=tuple(self._sizes[size] for size in sizes.split())) for name, sizes in row.files
            ),
            cut=row.cut,
            mix=row.mix,
            tensor_ranks=self._layout.tensor,
            groups=self._groups,
        )
