"""Rules of ``learner.engine=fsdp2``: data parallel × (tensor parallel or sequence parallel)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.description import dealt, experts_of, heads_of, text_of
from asyncrl.config.ranks import Layout, divisor, multiple
from asyncrl.config.refusals import Refusal
from asyncrl.errors import ConfigError, UnsupportedError

__all__ = ["LORA_TENSOR", "MOE_TENSOR", "SHARDS_TENSOR", "TENSOR_SEQUENCE", "check_fsdp2", "check_fsdp2_model"]

TENSOR_SEQUENCE = Refusal(
    combination="tensor parallel with sequence parallel",
    reason="both cut the attention heads",
    nearest="learner.tensor_parallel or learner.sequence_parallel alone",
)
SHARDS_TENSOR = Refusal(
    combination="sharding over part of the ranks with tensor or sequence parallel",
    reason="a mesh of ranks has two dimensions",
    nearest="learner.shard_ranks=0",
)
LORA_TENSOR = Refusal(
    combination="LoRA with tensor parallel",
    reason="the model's plan says nothing of how adapters are cut",
    nearest="learner.tensor_parallel=1, with learner.sequence_parallel or more ranks",
)
MOE_TENSOR = Refusal(
    combination="tensor parallel of a mixture of experts",
    reason="experts and router losses are not cut by the plan for dense layers",
    nearest="learner.tensor_parallel=1, with learner.sequence_parallel or more ranks, or learner.engine=megatron",
)


def check_fsdp2(layout: Layout) -> None:
    """Rules between the numbers.

    Raises:
        UnsupportedError: a combination that is refused, with the nearest that works.
        ConfigError: ranks that do not divide, with the numbers that would.
    """
    tensor, sequence, shards = layout.tensor_parallel, layout.sequence_parallel, layout.shard_ranks
    if tensor > 1 and sequence > 1:
        _refuse(TENSOR_SEQUENCE, f"learner.tensor_parallel={tensor} with learner.sequence_parallel={sequence}")
    name, size = _cut(layout)
    if shards and size > 1:
        _refuse(SHARDS_TENSOR, f"learner.shard_ranks={shards} with learner.{name}_parallel={size}")
    if layout.lora_rank and tensor > 1:
        _refuse(LORA_TENSOR, f"learner.lora_rank={layout.lora_rank} with learner.tensor_parallel={tensor}")
    if layout.ranks % size:
        raise ConfigError(
            f"learner.ranks is a multiple of learner.{name}_parallel; met {layout.ranks} and {size}: "
            f"set learner.ranks={multiple(layout.ranks, size)}, or learner.{name}_parallel={divisor(layout.ranks, size)}"
        )
    if shards and layout.ranks % shards:
        raise ConfigError(
            f"learner.shard_ranks divides learner.ranks; met {shards} and {layout.ranks}: "
            f"set learner.shard_ranks={divisor(layout.ranks, shards)}, or 0 to shard over all"
        )


def check_fsdp2_model(layout: Layout, description: Mapping[str, Any]) -> None:
    """Rules between a layout and a model's ``config.json``.

    Raises:
        UnsupportedError: a model of experts under tensor parallel.
        ConfigError: attention heads that cannot be dealt to the ranks, with the sizes that can.
    """
    text = text_of(description)
    tensor, sequence = layout.tensor_parallel, layout.sequence_parallel
    experts = experts_of(text)
    if tensor > 1 and experts > 1:
        _refuse(MOE_TENSOR, f"learner.tensor_parallel={tensor} of a model with {experts} experts")
    name, size = _cut(layout)
    if size == 1:
        return
    heads, pairs = heads_of(text, f"learner.{name}_parallel={size}")
    copies = sequence > 1  # of a key/value head, on several ranks
    if heads % size or not (pairs % size == 0 or (copies and dealt(pairs, size))):
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (pairs % n == 0 or (copies and dealt(pairs, n)))]
        raise ConfigError(
            f"learner.{name}_parallel deals the model's {heads} attention heads and {pairs} key/value heads evenly; met {size}: "
            f"set it to {' or '.join(map(str, fits))}"
        )


def _cut(layout: Layout) -> tuple[str, int]:
    """What the ranks of a replica cut, and how many they are."""
    return ("tensor", layout.tensor_parallel) if layout.tensor_parallel > 1 else ("sequence", layout.sequence_parallel)


def _refuse(refusal: Refusal, asked: str) -> None:
    raise UnsupportedError(f"{asked} is not supported: {refusal.reason}; nearest that works: {refusal.nearest}")
