"""Which models ``learner.engine=megatron`` builds out of megatron-core's layers, told from their ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.refusals import Refusal
from asyncrl.errors import UnsupportedError

__all__ = ["FAMILIES", "MODELS", "check_built"]

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of ``model_type``."""

MODELS = Refusal(
    combination=f"models other than {', '.join(FAMILIES)}, or with parts that these do not have by default",
    reason="no table says what megatron-core's layers make of them",
    nearest="learner.engine=fsdp2",
)

_ROPE = ("default", "llama3")


def check_built(text: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where a model is of another family, or has parts that the layers are not built with; names the first."""
    family = str(text.get("model_type") or "")
    rope = _rope(text)
    one_expert = family == "qwen3_moe" and bool(text.get("norm_topk_prob")) and int(text.get("num_experts_per_tok") or 0) == 1
    parts = (
        (family not in FAMILIES, f"model_type={family!r}"),
        (bool(text.get("attention_bias")), "attention_bias=true"),
        (bool(text.get("mlp_bias")), "mlp_bias=true"),
        (str(text.get("hidden_act") or "silu") != "silu", f"hidden_act={text.get('hidden_act')!r}"),
        (rope not in _ROPE, f"rope_type={rope!r}"),
        (int(text.get("decoder_sparse_step") or 1) != 1, f"decoder_sparse_step={text.get('decoder_sparse_step')}"),
        (bool(text.get("mlp_only_layers")), f"mlp_only_layers={text.get('mlp_only_layers')}"),
        (int(text.get("num_hidden_layers") or 0) < 1, f"num_hidden_layers={text.get('num_hidden_layers')}"),
        (one_expert, "num_experts_per_tok=1 and norm_topk_prob=true"),
    )
    for differs, met in parts:
        if differs:
            raise UnsupportedError(MODELS.text(f"a model with {met} under learner.engine=megatron"))


def _rope(text: Mapping[str, Any]) -> str:
    """How positions are scaled; files of transformers before 5 write it elsewhere."""
    rope: Mapping[str, Any] = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "default")
