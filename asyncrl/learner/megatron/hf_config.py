"""From a Hugging Face ``config.json`` to Megatron-core's configuration."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from asyncrl.learner.megatron.parallel import MegatronLayout

__all__ = ["head_size", "inverse_frequencies", "read_config", "transformer_config"]


def read_config(model_dir: str) -> Any:
    """A model folder's configuration as transformers reads it; what of it is built here says :mod:`asyncrl.config.model_megatron`."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_dir)


def transformer_config(config: Any, layout: MegatronLayout, *, dtype: torch.dtype, recompute: bool) -> Any:
    """Megatron-core's ``TransformerConfig``: parameters are float32; ``dtype`` is what travels between stages.

    Model and layout fit each other by :func:`asyncrl.config.layout.check_model_layout`.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = _experts(config, layout) if config.model_type == "qwen3_moe" else {}
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if recompute else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own defaults, which it calls deprecated
        return TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=head_size(config),
            normalization="RMSNorm",
            layernorm_epsilon=config.rms_norm_eps,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=config.model_type == "qwen2",
            qk_layernorm=config.model_type.startswith("qwen3"),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            perform_initialization=False,  # every weight is read from a file
            params_dtype=torch.float32,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            tensor_model_parallel_size=layout.tensor,
            sequence_parallel=layout.tensor > 1,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
            context_parallel_size=layout.context,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",  # the one that takes them; wanted of dense models too
            calculate_per_token_loss=True,  # gradients are summed, never averaged
            # all that wants Transformer Engine, Apex or a compiler
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            **experts,
            **recomputed,
        )


def head_size(config: Any) -> int:
    """Numbers in one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def inverse_frequencies(config: Any) -> torch.Tensor:
    """Of the rotary embedding, float32 [head / 2], as transformers computes them, llama3's scaling included."""
    rope, size = config.rope_parameters, head_size(config)
    frequencies: torch.Tensor
    if rope.get("rope_type", "default") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    else:
        frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
    return frequencies


def _experts(config: Any, layout: MegatronLayout) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # softmax over the chosen is what norm_topk_prob makes of softmax over all
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": 1,
    }
