"""What the rules of a layout read of a model's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import ConfigError

__all__ = ["dealt", "experts_of", "heads_of", "text_of"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def text_of(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model."""
    return description.get("text_config") or description


def experts_of(text: Mapping[str, Any]) -> int:
    """Experts of a layer; 0: none."""
    return max(int(text.get(name) or 0) for name in _EXPERTS)


def heads_of(text: Mapping[str, Any], asked: str) -> tuple[int, int]:
    """Attention heads, and key/value heads.

    Raises:
        ConfigError: the description tells no number of heads, which ``asked`` deals to ranks.
    """
    heads = int(text.get("num_attention_heads") or text.get("n_head") or 0)
    if heads == 0:
        raise ConfigError(f"{asked} deals attention heads to ranks, and the model's config.json tells no number of them")
    return heads, int(text.get("num_key_value_heads") or heads)


def dealt(pairs: int, size: int) -> bool:
    """Whether every one of ``size`` ranks gets equally many key/value heads, or each head goes to equally many ranks."""
    return pairs % size == 0 or size % pairs == 0
