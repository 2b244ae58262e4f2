"""Random models of two layers, one of them of four, in float32, one folder for each family.

Four heads over two key-value heads: enough for two shards, and two more that share one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["FAMILIES", "VOCABULARY", "write_model"]

VOCABULARY = 64
FAMILIES = ("qwen2", "qwen3", "qwen3 tied", "qwen3 deep", "llama", "qwen3 moe", "qwen3 value")


def write_model(folder: Path, family: str) -> str:
    """Writes a model of one of :data:`FAMILIES`; its path."""
    torch.manual_seed(0)
    _model(family).float().save_pretrained(folder)
    return str(folder)


def _model(family: str) -> Any:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4 if family == "qwen3 deep" else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": family == "qwen3 tied",
        # wider than the default of 0.02, at which all scores are nearly flat and a leak between sequences would hardly show
        "initializer_range": 0.05,
    }
    if family == "qwen2":
        del shape["head_dim"]  # its heads divide the hidden size
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
        for name, parameter in model.named_parameters():  # drawn as zeros, at which no bias would show
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.05)
        return model
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    if family == "qwen3 moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **experts))
    if family == "qwen3 value":
        return transformers.Qwen3ForTokenClassification(transformers.Qwen3Config(**shape, num_labels=1))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
