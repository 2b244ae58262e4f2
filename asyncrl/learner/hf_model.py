"""Loads a Hugging Face model for training, and finds in it what is sharded and what is tied."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.errors import UnsupportedError

__all__ = ["layers_of", "load_model", "load_value_model", "refuse_windows", "ties_of"]

_SEED = 0  # of a value head that a folder does not have: every rank starts from the same


def load_model(model_dir: str, attention: str) -> Any:
    """The causal model in float32 on the CPU, every dropout off: learner and generator must compute the same function."""
    from transformers import AutoModelForCausalLM

    config = _config(model_dir)
    return AutoModelForCausalLM.from_pretrained(model_dir, config=config, dtype=torch.float32, attn_implementation=attention)


def load_value_model(model_dir: str, attention: str) -> Any:
    """The decoder in float32 on the CPU under a head of one number (``score``), read from the folder or drawn anew."""
    from transformers import AutoModelForTokenClassification

    config = _config(model_dir)
    config.num_labels = 1
    config.classifier_dropout = 0.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return AutoModelForTokenClassification.from_pretrained(model_dir, config=config, dtype=torch.float32, attn_implementation=attention)


def _config(model_dir: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    for name in [name for name in vars(config) if name.endswith(("dropout", "_pdrop"))]:
        setattr(config, name, 0.0)
    return config


def refuse_windows(config: Any, cap_tokens: int) -> None:
    """Raises UnsupportedError where a model's attention forgets tokens inside a pack: the masks made here know no window."""
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None)
    if slides and window and window < cap_tokens:
        raise UnsupportedError(
            f"attention reaches over learner.micro_batch_tokens = {cap_tokens} tokens; {config.model_type} slides over {window} "
            f"tokens: set learner.micro_batch_tokens to at most {window}"
        )


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The decoder layers, by the class names that the model itself declares inseparable.

    Raises:
        UnsupportedError: the model declares none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UnsupportedError(f"{type(model).__name__} declares no decoder layers (_no_split_modules): it cannot be sharded by layer")
    return layers


def ties_of(model: torch.nn.Module) -> dict[str, str]:
    """Names of parameters that are another one's tensor, with the name that carries it."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        carrier = first.setdefault(id(parameter), name)
        if carrier != name:
            ties[name] = carrier
    return ties
