"""The one table between Megatron-core's parameters and the tensors of Hugging Face files: names, shapes, and what is cut."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from asyncrl.learner.megatron.hf_config import head_size

__all__ = ["DENSE", "EMBEDDING", "EXPERT", "HEAD", "NORM", "OF_FAMILY", "ROUTER", "TIED_HEAD", "VALUE", "Mix", "Row", "sizes"]


class Mix(enum.Enum):
    """How the parts of a rank become its parameter."""

    ALONE = "one part"
    BEHIND = "one after the other"
    GROUPED = "of each key/value head: its queries, its key, its value"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of parameter.

    Attributes:
        megatron: its name, below its layer's; files: names of its file tensors, each with the sizes of its dimensions, which
        :func:`sizes` tells; cut: the dimension of all of them that tensor ranks cut, None where every rank has them whole; mix: see
        there.
    """

    megatron: str
    files: tuple[tuple[str, str], ...]
    cut: int | None = None
    mix: Mix = Mix.ALONE


def _row(megatron: str, *files: tuple[str, str], cut: int | None = None, mix: Mix = Mix.ALONE) -> Row:
    return Row(megatron=megatron, files=files, cut=cut, mix=mix)


def _qkv(kind: str, behind: str) -> Row:
    parts = (("q", "queries"), ("k", "keys"), ("v", "keys"))
    files = ((f"self_attn.{part}_proj.{kind}", size + behind) for part, size in parts)
    return _row(f"self_attention.linear_qkv.{kind}", *files, cut=0, mix=Mix.GROUPED)


def _gated(size: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("gate_proj.weight", f"{size} hidden"), ("up_proj.weight", f"{size} hidden")


EMBEDDING = _row("embedding.word_embeddings.weight", ("model.embed_tokens.weight", "vocabulary hidden"), cut=0)
_LAYER = (
    _row("input_layernorm.weight", ("input_layernorm.weight", "hidden")),
    _qkv("weight", " hidden"),
    _row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", "hidden queries"), cut=1),
    _row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", "hidden")),
)
_QK_NORM = tuple(_row(f"self_attention.{part}_layernorm.weight", (f"self_attn.{part}_norm.weight", "head")) for part in "qk")
DENSE = (
    _row("mlp.linear_fc1.weight", *((f"mlp.{name}", size) for name, size in _gated("inner")), cut=0, mix=Mix.BEHIND),
    _row("mlp.linear_fc2.weight", ("mlp.down_proj.weight", "hidden inner"), cut=1),
)
ROUTER = (_row("mlp.router.weight", ("mlp.gate.weight", "experts hidden")),)
EXPERT = (  # whole on its rank
    _row("linear_fc1.weight", *_gated("expert"), mix=Mix.BEHIND),
    _row("linear_fc2.weight", ("down_proj.weight", "hidden expert")),
)
NORM = _row("decoder.final_layernorm.weight", ("model.norm.weight", "hidden"))
HEAD = _row("output_layer.weight", ("lm_head.weight", "vocabulary hidden"), cut=0)
TIED_HEAD = _row("output_layer.weight", *EMBEDDING.files, cut=0)
VALUE = (_row("output_layer.weight", ("score.weight", "one hidden")), _row("output_layer.bias", ("score.bias", "one")))

OF_FAMILY = {"llama": _LAYER, "qwen2": (*_LAYER, _qkv("bias", "")), "qwen3": (*_LAYER, *_QK_NORM), "qwen3_moe": (*_LAYER, *_QK_NORM)}


def sizes(config: Any) -> dict[str, int]:
    head = head_size(config)
    return {
        "one": 1,
        "vocabulary": config.vocab_size,
        "hidden": config.hidden_size,
        "head": head,
        "queries": config.num_attention_heads * head,
        "keys": config.num_key_value_heads * head,
        "inner": config.intermediate_size,
        "experts": getattr(config, "num_experts", 0),
        "expert": getattr(config, "moe_intermediate_size", 0),
    }
