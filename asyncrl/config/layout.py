"""How learner ranks share the work: the rules between the numbers, and between them and the model, by engine.

``check_layout`` needs the options alone and runs when they are read; ``check_model_layout`` needs the model's ``config.json`` and runs
before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.description import experts_of, text_of
from asyncrl.config.layout_fsdp2 import check_fsdp2, check_fsdp2_model
from asyncrl.config.layout_megatron import check_megatron, check_megatron_model
from asyncrl.config.ranks import Layout
from asyncrl.errors import UnsupportedError

__all__ = ["Layout", "check_layout", "check_model_layout", "check_router_loss"]


def check_layout(layout: Layout) -> None:
    """Rules between the numbers.

    Raises:
        UnsupportedError: a combination that is refused, with the nearest that works.
        ConfigError: ranks that do not divide, with the numbers that would.
    """
    {"fsdp2": check_fsdp2, "megatron": check_megatron}[layout.engine](layout)


def check_model_layout(layout: Layout, description: Mapping[str, Any]) -> None:
    """Rules between a layout and the model's ``config.json``.

    Raises:
        UnsupportedError: a model that the engine does not train in this layout.
        ConfigError: what cannot be dealt to the ranks, with the sizes that can.
    """
    {"fsdp2": check_fsdp2_model, "megatron": check_megatron_model}[layout.engine](layout, description)


def check_router_loss(weight: float, description: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where a router's loss is asked of a model without experts."""
    if weight and not experts_of(text_of(description)):
        raise UnsupportedError(
            f"learner.router_loss={weight:g} is not supported: the model has no experts; nearest that works: learner.router_loss=0"
        )
