"""From a Hugging Face ``config.json`` to Megatron-core's configuration; what has no equal there is refused by name."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch

from asyncrl.errors import ConfigError, UnsupportedError
from asyncrl.learner.megatron.parallel import MegatronLayout

__all__ = ["FAMILIES", "head_size", "inverse_frequencies", "read_config", "transformer_config"]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def read_config(model_dir: str) -> Any:
    """A model folder's configuration as transformers reads it.

    Raises:
        UnsupportedError: another family than :data:`FAMILIES`, or a setting that the four share no code for.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    family = config.model_type
    if family not in FAMILIES:
        _refuse(f"model_type {family}", f"a model of {', '.join(FAMILIES)}, or learner=fsdp2")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        _refuse(f"attention_bias or mlp_bias of {family}", "a model without, or learner=fsdp2")
    if getattr(config, "hidden_act", "silu") != "silu":
        _refuse(f"hidden_act {config.hidden_act}", "silu, or learner=fsdp2")
    if family == "qwen3_moe" and (config.decoder_sparse_step != 1 or config.mlp_only_layers):
        _refuse(
            "a mixture of experts in some layers only (decoder_sparse_step, mlp_only_layers)", "experts in every layer, or learner=fsdp2"
        )
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        _refuse(f"rope_type {rope['rope_type']}", "default or llama3, or learner=fsdp2")
    return config


def transformer_config(config: Any, layout: MegatronLayout, *, dtype: torch.dtype, recompute: bool) -> Any:
    """Megatron-core's ``TransformerConfig``: parameters are float32; ``dtype`` is what travels between stages.

    Raises:
        ConfigError: the model's vocabulary, layers or experts cannot be dealt to the ranks evenly.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    _check_even(config, layout)
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
    rope = config.rope_parameters
    if rope.get("rope_type", "default") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        return frequencies
    size = head_size(config)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return torch.tensor(1.0) / rope["rope_theta"] ** exponents


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


def _check_even(config: Any, layout: MegatronLayout) -> None:
    rules = [
        ("vocab_size", config.vocab_size, "learner.tensor_parallel", layout.tensor),
        ("num_attention_heads", config.num_attention_heads, "learner.tensor_parallel", layout.tensor),
        ("num_key_value_heads", config.num_key_value_heads, "learner.tensor_parallel", layout.tensor),
        ("intermediate_size", config.intermediate_size, "learner.tensor_parallel", layout.tensor),
        (
            "num_hidden_layers",
            config.num_hidden_layers,
            "learner.pipeline_parallel x learner.virtual_pipeline",
            layout.pipeline * layout.chunks,
        ),
        ("num_experts", getattr(config, "num_experts", 0) or 0, "learner.expert_parallel", layout.expert),
    ]
    for name, number, option, size in rules:
        if number % size or (size > 1 and not number):
            raise ConfigError(f"{option} divides the model's {name}; met {size} and {number}: set it to a divisor of {number}")


def _refuse(met: str, nearest: str) -> NoReturn:
    raise UnsupportedError(f"learner=megatron does not compute {met}; nearest that works: {nearest}")
