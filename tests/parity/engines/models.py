"""Random models of two layers, in float32, one folder for each family. Four heads over two key-value heads: enough for two shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["VOCABULARY", "write_model"]

VOCABULARY = 64


def write_model(folder: Path, family: str) -> str:
    """Writes the family's model; its path. Families: ``qwen3``, ``qwen3 tied``, ``llama``."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": family.endswith(" tied"),
        # wider than the default of 0.02, at which all scores are nearly flat and a leak between sequences would hardly show
        "initializer_range": 0.05,
    }
    torch.manual_seed(0)
    kind = family.removesuffix(" tied")
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    model.float().save_pretrained(folder)
    return str(folder)
