"""LoRA on every linear layer of the decoder: what is trained, what the generators get, and the reference with the adapters off.

Fused experts and their router are no linear layers.

Source: LoRA (arXiv:2106.09685), through ``peft``: y = W x + (alpha / rank) · B A x, B zero at the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from asyncrl.config import LearnerConfig
from asyncrl.errors import UnsupportedError

__all__ = ["ADAPTED", "adapters_off", "add_adapters", "base_name", "is_adapter", "low_rank_of", "merged", "scale_of"]

ADAPTED = "base_layer.weight"
_SEED = 0  # every rank starts from the same adapters
_A, _B = "lora_A.default.weight", "lora_B.default.weight"


def add_adapters(model: Any, rank: int, alpha: int) -> None:
    """Puts an adapter on each linear layer of the decoder, and freezes everything else but a value head.

    Raises:
        UnsupportedError: the decoder has no linear layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    # seen as a transformers model, peft would adapt fused experts too, which merge by another rule, and their files have other shapes
    decoder = torch.nn.ModuleList([model.get_decoder()])
    linear = [name for name, module in decoder.named_modules() if isinstance(module, torch.nn.Linear)]
    if not linear:
        raise UnsupportedError(f"LoRA adapts linear layers; {type(model).__name__} has none: set learner.lora_rank to 0")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=linear, lora_dropout=0.0, bias="none"), decoder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name.startswith("score."))


def scale_of(settings: LearnerConfig) -> float:
    """What B · A counts beside W: alpha / rank; 0 without adapters."""
    return settings.lora_alpha / settings.lora_rank if settings.lora_rank else 0.0


@contextlib.contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model computes what it did before it had adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # the public switch changes requires_grad too, which sharded parameters remember
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name that a parameter has in a model without adapters."""
    return name.replace(".base_layer.", ".")


def low_rank_of(name: str) -> tuple[str, str]:
    """Names of A and B beside an adapted weight, which ends in ``ADAPTED``."""
    stem = name.removesuffix(ADAPTED)
    return stem + _A, stem + _B


def merged(name: str, weight: torch.Tensor, adapters: Mapping[str, torch.Tensor], scale: float) -> torch.Tensor:
    """The weight that does alone what ``weight`` does with its adapter: W + scale · B A, in the precision of ``weight``."""
    a, b = (adapters[part] for part in low_rank_of(name))
    return weight + scale * (b @ a)
