"""Hugging Face files → Megatron-core → the same files, bit for bit, on every rank of every kind of layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.errors import DataError
from asyncrl.learner.hf_model import load_value_model
from engines.megatron_models import MEGATRON_FAMILIES, write_megatron_model
from engines.suite import Suite

pytestmark = pytest.mark.real

LAYOUTS = {
    "one rank": {"ranks": 1},
    "TP2": {"ranks": 2, "tensor": 2},
    "PP2": {"ranks": 2, "pipeline": 2},
    "PP2, interleaved": {"ranks": 2, "pipeline": 2, "chunks": 2},
    "TP2×PP2": {"ranks": 4, "tensor": 2, "pipeline": 2},
    "TP4, more ranks than key/value heads": {"ranks": 4, "tensor": 4},
}
EXPERTS = {  # and the numbers that a rank holds: worked out below
    "EP2": ({"ranks": 2, "expert": 2}, {40_320}),
    "TP2×EP2": ({"ranks": 2, "tensor": 2, "expert": 2}, {29_824}),
    "PP2×EP2": ({"ranks": 4, "pipeline": 2, "expert": 2}, {20_144, 20_176}),
}
# layer: norms 64, queries, keys and values 3072, output 1536, norms of heads 24, router 128, two of four experts 4608; together 9432
# embedding 1280, head 1280, last norm 32; 2592 + 4 · 9432; the last stage has the norm, 2 · 9432 + 1280 (+ 32)
# of two tensor ranks each has half of embedding, head, queries to values, and output: 1312 + 4 · (9432 - 2304)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``folders``: of models by family; ``sizes``: of the layout."""

    folders: Mapping[str, str]
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """``names``: in the order that they came in; ``differ``: those that are not what the file has; ``numbers``: that the rank holds."""

    names: tuple[str, ...]
    differ: tuple[str, ...]
    numbers: int


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: write_megatron_model(tmp_path_factory.mktemp("models"), family) for family in MEGATRON_FAMILIES}


def loaded(folder: str, sizes: Mapping[str, int], *, value_head: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """This rank's chunks, and what all ranks export together."""
    from asyncrl.learner.megatron.attention import PackedAttention
    from asyncrl.learner.megatron.hf_config import read_config, transformer_config
    from asyncrl.learner.megatron.model import build_chunks
    from asyncrl.learner.megatron.parallel import MegatronLayout, start_parallel
    from asyncrl.learner.megatron.weights import export_tensors, load_weights

    parallel, config = start_parallel(MegatronLayout(**sizes)), read_config(folder)
    core = transformer_config(config, parallel.layout, dtype=torch.float32, recompute=False)
    chunks = build_chunks(config, core, parallel, attention=PackedAttention, value_head=value_head)
    load_weights(chunks, folder, config, parallel, value_head=value_head)
    return chunks, dict(export_tensors(chunks, config, parallel, value_head=value_head, dtype=torch.float32))


def trips(order: Order) -> dict[str, Trip]:
    """There and back with each model, on this rank."""
    return {family: _trip(folder, order.sizes, value_head=family == "value head") for family, folder in order.folders.items()}


def _trip(folder: str, sizes: Mapping[str, int], *, value_head: bool) -> Trip:
    chunks, got = loaded(folder, sizes, value_head=value_head)
    file = load_file(Path(folder) / "model.safetensors")
    differ = [name for name, tensor in got.items() if name not in file or not torch.equal(tensor, file[name])]
    numbers = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    return Trip(names=tuple(got), differ=(*differ, *(file.keys() - got.keys())), numbers=numbers)


def head_of(folder: str) -> dict[str, torch.Tensor]:
    """What a value model starts with that has no head in its folder."""
    _, got = loaded(folder, {"ranks": 1}, value_head=True)
    return {name: tensor for name, tensor in got.items() if name.startswith("score.")}


def refusal(folder: str) -> str:
    """Why a folder cannot be read."""
    try:
        loaded(folder, {"ranks": 1}, value_head=False)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_read_is_exported_again_bit_for_bit(suite: Suite, folders: dict[str, str], layout: str):
    sizes = LAYOUTS[layout]
    ranks = suite.give(f"round trips on {layout}", sizes["ranks"], trips, Order(folders=folders, sizes=sizes))
    for family in MEGATRON_FAMILIES:
        assert [rank[family].differ for rank in ranks] == [()] * len(ranks), family
        assert len({rank[family].names for rank in ranks}) == 1, "every rank gets every tensor in the same order"


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_that_are_dealt_to_ranks_come_together_again(suite: Suite, folders: dict[str, str], layout: str):
    sizes, numbers = EXPERTS[layout]
    order = Order(folders={"qwen3 moe": folders["qwen3 moe"]}, sizes=sizes)
    ranks = [rank["qwen3 moe"] for rank in suite.give(f"round trip on {layout}", sizes["ranks"], trips, order)]
    assert [rank.differ for rank in ranks] == [()] * len(ranks)
    assert {rank.numbers for rank in ranks} == numbers


def test_a_head_that_a_folder_lacks_is_drawn_as_transformers_draws_it(suite: Suite, folders: dict[str, str]):
    (drawn,) = suite.give("the drawn head", 1, head_of, folders["qwen3"])
    expected = load_value_model(folders["qwen3"], "eager").score
    assert torch.equal(drawn["score.weight"], expected.weight) and torch.equal(drawn["score.bias"], expected.bias)


def _without_last_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _with_sinks(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)


def _with_longer_words(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = torch.zeros(41, 32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_last_norm, "lacks 1 of .* tensors of llama, model.norm.weight first"),
        (_with_sinks, "1 tensors that llama has no place for, model.layers.0.self_attn.sinks first"),
        (_with_longer_words, r"model.embed_tokens.weight has the shape \(40, 32\) by config.json; met \(41, 32\)"),
    ],
)
def test_files_of_another_model_are_refused(
    suite: Suite, folders: dict[str, str], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
):
    source = Path(folders["llama"])
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "part-1.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "part-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (answer,) = suite.give("files of another model", 1, refusal, str(tmp_path))
    assert re.search(said, answer), answer
