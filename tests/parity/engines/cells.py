"""The cells: every layout that an engine claims, with the options that ask for it. Another engine adds one tuple."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CELLS", "Cell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One layout of one engine on one tiny model.

    Attributes:
        backend: the engine's name in the registry; name: of the layout, unique within the backend.
        ranks: processes; replicas: how many of them get rows of their own, which the engine has to say itself.
        model: family of :mod:`engines.models`; model_type: as the registry has it; learner: options beyond the common ones.
        only_cpu: refused on GPUs, by name.
    """

    backend: str
    name: str
    ranks: int
    replicas: int
    model: str = "qwen3"
    model_type: str = "language_model"
    learner: Mapping[str, Any] = field(default_factory=dict)
    only_cpu: bool = False

    def __str__(self) -> str:
        return f"{self.backend} {self.name}"


_FSDP2 = (
    Cell(backend="fsdp2", name="one rank", ranks=1, replicas=1),
    Cell(backend="fsdp2", name="one rank, eager attention", ranks=1, replicas=1, learner={"attention": "eager"}),
    Cell(backend="fsdp2", name="DP2", ranks=2, replicas=2, model="qwen3 tied"),
    Cell(backend="fsdp2", name="DP4", ranks=4, replicas=4, model="llama"),
    Cell(backend="fsdp2", name="HSDP 2×2", ranks=4, replicas=4, learner={"shard_ranks": 2}),
    Cell(backend="fsdp2", name="SP2", ranks=2, replicas=1, learner={"sequence_parallel": 2}),
    Cell(backend="fsdp2", name="SP2×DP2", ranks=4, replicas=2, model="qwen3 tied", learner={"sequence_parallel": 2}),
    Cell(backend="fsdp2", name="TP2", ranks=2, replicas=1, learner={"tensor_parallel": 2}),
    Cell(backend="fsdp2", name="TP2×DP2", ranks=4, replicas=2, model="qwen3 tied", learner={"tensor_parallel": 2}),
    Cell(backend="fsdp2", name="offload", ranks=2, replicas=2, learner={"offload": True}),
    Cell(
        backend="fsdp2",
        name="checkpointing",
        ranks=2,
        replicas=2,
        learner={"activation_checkpointing": True, "logits_chunk_mib": 0.001},
    ),
    Cell(backend="fsdp2", name="LoRA, DP2", ranks=2, replicas=2, learner={"lora_rank": 4, "lora_alpha": 8}),
    Cell(backend="fsdp2", name="LoRA, SP2", ranks=2, replicas=1, learner={"lora_rank": 4, "lora_alpha": 8, "sequence_parallel": 2}),
    Cell(backend="fsdp2", name="value head, DP2", ranks=2, replicas=2, model="qwen3 value", model_type="value_model"),
    Cell(
        backend="fsdp2",
        name="value head, TP2",
        ranks=2,
        replicas=1,
        model="qwen3 value",
        model_type="value_model",
        learner={"tensor_parallel": 2},
    ),
    Cell(backend="fsdp2", name="MoE, DP2", ranks=2, replicas=2, model="qwen3 moe", learner={"router_loss": 0.1}),
    Cell(backend="fsdp2", name="MoE, SP2", ranks=2, replicas=1, model="qwen3 moe", learner={"router_loss": 0.1, "sequence_parallel": 2}),
)

_MEGATRON = (
    Cell(backend="megatron", name="one rank", ranks=1, replicas=1),
    Cell(backend="megatron", name="DP2", ranks=2, replicas=2, model="qwen3 tied"),
    Cell(backend="megatron", name="TP2", ranks=2, replicas=1, model="qwen2", learner={"tensor_parallel": 2}),
    Cell(backend="megatron", name="TP2×DP2", ranks=4, replicas=2, model="qwen3 tied", learner={"tensor_parallel": 2}),
    Cell(backend="megatron", name="TP4, more than key/value heads", ranks=4, replicas=1, learner={"tensor_parallel": 4}),
    Cell(backend="megatron", name="PP2", ranks=2, replicas=1, model="qwen3 tied", learner={"pipeline_parallel": 2}),
    Cell(backend="megatron", name="PP2×DP2", ranks=4, replicas=2, model="qwen3 tied", learner={"pipeline_parallel": 2}),
    Cell(
        backend="megatron",
        name="value head, PP2",
        ranks=2,
        replicas=1,
        model="qwen3 value",
        model_type="value_model",
        learner={"pipeline_parallel": 2},
    ),
    Cell(backend="megatron", name="PP4", ranks=4, replicas=1, model="qwen3 deep", learner={"pipeline_parallel": 4}),
    Cell(
        backend="megatron",
        name="TP2×PP2",
        ranks=4,
        replicas=1,
        model="qwen3 tied",
        learner={"tensor_parallel": 2, "pipeline_parallel": 2},
    ),
    Cell(backend="megatron", name="CP2", ranks=2, replicas=1, model="llama", learner={"context_parallel": 2}),
    Cell(
        backend="megatron",
        name="interleaved PP2",
        ranks=2,
        replicas=1,
        model="qwen3 deep",
        learner={"pipeline_parallel": 2, "virtual_pipeline": 2},
        only_cpu=True,
    ),
    Cell(backend="megatron", name="MoE, EP2", ranks=2, replicas=2, model="qwen3 moe", learner={"router_loss": 0.1, "expert_parallel": 2}),
    Cell(backend="megatron", name="MoE, TP2", ranks=2, replicas=1, model="qwen3 moe", learner={"router_loss": 0.1, "tensor_parallel": 2}),
    Cell(
        backend="megatron",
        name="MoE, TP2×EP2",
        ranks=4,
        replicas=2,
        model="qwen3 moe",
        learner={"router_loss": 0.1, "tensor_parallel": 2, "expert_parallel": 2},
    ),
    Cell(
        backend="megatron",
        name="checkpointing",
        ranks=2,
        replicas=1,
        learner={"activation_checkpointing": True, "logits_chunk_mib": 0.001, "tensor_parallel": 2},
    ),
)

CELLS: tuple[Cell, ...] = _FSDP2 + _MEGATRON
