"""Random models of the families that Megatron-core computes here, four layers each: enough for two stages of two chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["MEGATRON_FAMILIES", "write_megatron_model"]

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MEGATRON_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2 tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 12}),
    "llama": ("LlamaForCausalLM", {}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {"head_dim": 12, **_EXPERTS}),
    "value head": ("Qwen3ForTokenClassification", {"head_dim": 12, "num_labels": 1}),
}
"""Class of the model, and what is special about its configuration."""
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama wide": ("LlamaForCausalLM", {"intermediate_size": 64}),
}


def write_megatron_model(folder: Path, family: str) -> str:
    """Writes a model of one of :data:`MEGATRON_FAMILIES` or, to be told from it, another Llama, every weight random; its path."""
    import transformers

    name, special = (MEGATRON_FAMILIES | _OTHERS)[family]
    kind = getattr(transformers, name)
    shape = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = kind(kind.config_class(**shape | special)).float()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which start as ones and zeros
            parameter.normal_()
    model.save_pretrained(folder)
    return str(folder)
