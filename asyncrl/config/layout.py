"""How learner ranks share the work: the rules between the numbers, and between them and the model.

A layout is data parallel × (tensor parallel or sequence parallel). ``check_layout`` needs the options alone and runs when they are
read; ``check_model_layout`` needs the model's ``config.json`` and runs before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.refusals import Refusal
from asyncrl.config.schema import LearnerConfig
from asyncrl.errors import ConfigError, UnsupportedError

__all__ = [
    "LORA_TENSOR",
    "MOE_TENSOR",
    "SHARDS_TENSOR",
    "TENSOR_SEQUENCE",
    "Layout",
    "check_layout",
    "check_model_layout",
    "check_router_loss",
]

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
    nearest="learner.tensor_parallel=1, with learner.sequence_parallel or more ranks",
)

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers of ranks.

    Attributes:
        ranks: all of the learner's.
        tensor_parallel, sequence_parallel: ranks of one replica that cut the matrices, or the tokens, among them.
        shard_ranks: ranks that one copy of the weights is sharded over; 0: all data-parallel ones.
        lora_rank: inner size of the adapters; 0: none.

    Example:
        >>> Layout(ranks=8, tensor_parallel=2).data_parallel
        4
    """

    ranks: int
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    shard_ranks: int = 0
    lora_rank: int = 0

    @classmethod
    def of(cls, learner: LearnerConfig) -> Layout:
        """The layout that the options ask for."""
        return cls(
            ranks=learner.ranks,
            tensor_parallel=learner.tensor_parallel,
            sequence_parallel=learner.sequence_parallel,
            shard_ranks=learner.shard_ranks,
            lora_rank=learner.lora_rank,
        )

    @property
    def replica_ranks(self) -> int:
        """Ranks that train the same rows together."""
        return self.tensor_parallel * self.sequence_parallel

    @property
    def data_parallel(self) -> int:
        """Replicas that train different rows."""
        return self.ranks // self.replica_ranks


def check_layout(layout: Layout) -> None:
    """Rules between the numbers.

    Raises:
        UnsupportedError: a combination that is refused, with the nearest that works.
        ConfigError: ranks that do not divide, with the numbers that would.
    """
    tensor, sequence, shards = layout.tensor_parallel, layout.sequence_parallel, layout.shard_ranks
    if tensor > 1 and sequence > 1:
        _refuse(TENSOR_SEQUENCE, f"learner.tensor_parallel={tensor} with learner.sequence_parallel={sequence}")
    if shards and layout.replica_ranks > 1:
        name, size = ("tensor", tensor) if tensor > 1 else ("sequence", sequence)
        _refuse(SHARDS_TENSOR, f"learner.shard_ranks={shards} with learner.{name}_parallel={size}")
    if layout.lora_rank and tensor > 1:
        _refuse(LORA_TENSOR, f"learner.lora_rank={layout.lora_rank} with learner.tensor_parallel={tensor}")
    if layout.ranks % layout.replica_ranks:
        name, size = ("tensor", tensor) if tensor > 1 else ("sequence", sequence)
        raise ConfigError(
            f"learner.ranks is a multiple of learner.{name}_parallel; met {layout.ranks} and {size}: "
            f"set learner.ranks={_multiple(layout.ranks, size)}, or learner.{name}_parallel={_divisor(layout.ranks, size)}"
        )
    if shards and layout.ranks % shards:
        raise ConfigError(
            f"learner.shard_ranks divides learner.ranks; met {shards} and {layout.ranks}: "
            f"set learner.shard_ranks={_divisor(layout.ranks, shards)}, or 0 to shard over all"
        )


def check_model_layout(layout: Layout, description: Mapping[str, Any]) -> None:
    """Rules between a layout and the model's ``config.json``.

    Raises:
        UnsupportedError: a model of experts under tensor parallel.
        ConfigError: attention heads that cannot be dealt to the ranks, with the sizes that can.
    """
    text: Mapping[str, Any] = description.get("text_config") or description
    tensor, sequence = layout.tensor_parallel, layout.sequence_parallel
    experts = _experts(text)
    if tensor > 1 and experts > 1:
        _refuse(MOE_TENSOR, f"learner.tensor_parallel={tensor} of a model with {experts} experts")
    if layout.replica_ranks == 1:
        return
    name, size = ("tensor", tensor) if tensor > 1 else ("sequence", sequence)
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 0)
    if heads == 0:
        raise ConfigError(
            f"learner.{name}_parallel={size} deals attention heads to ranks, and the model's config.json tells no number of them"
        )
    pairs = int(text.get("num_key_value_heads") or heads)
    if heads % size or not _dealt(pairs, size, copies=sequence > 1):
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and _dealt(pairs, n, copies=sequence > 1)]
        raise ConfigError(
            f"learner.{name}_parallel deals the model's {heads} attention heads and {pairs} key/value heads evenly; met {size}: "
            f"set it to {' or '.join(map(str, fits))}"
        )


def check_router_loss(weight: float, description: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where a router's loss is asked of a model without experts."""
    if weight and not _experts(description.get("text_config") or description):
        raise UnsupportedError(
            f"learner.router_loss={weight:g} is not supported: the model has no experts; nearest that works: learner.router_loss=0"
        )


def _experts(description: Mapping[str, Any]) -> int:
    return max(int(description.get(name) or 0) for name in _EXPERTS)


def _dealt(pairs: int, size: int, *, copies: bool) -> bool:
    """Whether every rank gets equally many key/value heads; fewer heads than ranks are copied where ``copies``."""
    return pairs % size == 0 or (copies and size % pairs == 0)


def _refuse(refusal: Refusal, asked: str) -> None:
    raise UnsupportedError(f"{asked} is not supported: {refusal.reason}; nearest that works: {refusal.nearest}")


def _multiple(number: int, size: int) -> int:
    return -(-number // size) * size


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` up to ``limit``."""
    return next(n for n in range(min(limit, number), 0, -1) if number % n == 0)
