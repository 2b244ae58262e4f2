"""Frequencies of the rotary embedding under Megatron-core are those that transformers computes."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncrl.learner.megatron.hf_config import inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3], ids=["default", "llama3"])
def test_frequencies_are_those_of_transformers_bit_for_bit(rope: dict[str, Any]):
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=131_072, rope_parameters=rope
    )
    expected = LlamaRotaryEmbedding(config).inv_freq
    assert torch.equal(inverse_frequencies(config), expected)


def test_llama3_slows_the_slowest_frequencies_by_its_factor_and_leaves_the_fastest():
    plain, scaled = (
        inverse_frequencies(LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope))
        for rope in ({"rope_type": "default", "rope_theta": 500_000.0}, LLAMA3)
    )
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1].item() / 8.0, rel=1e-6)
