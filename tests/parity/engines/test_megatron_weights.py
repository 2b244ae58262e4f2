"""Hugging Face files → Megatron-core → the same files, bit for bit, on every rank of every kind of layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
CASES = [(family, layout) for family in MEGATRON_FAMILIES for layout in LAYOUTS]
EXPERTS = {  # and the numbers that a rank holds: worked out below
    "EP2": ({"ranks": 2, "expert": 2}, {40_320}),
    "TP2×EP2": ({"ranks": 2, "tensor": 2, "expert": 2}, {29_824}),
    "PP2×EP2": ({"ranks": 4, "pipeline": 2, "expert": 2}, {20_144, 20_176}),
}
# layer: norms 64, queries, keys and values 3072, output 1536, norms of heads 24, router 128, two of four experts 4608; together 9432
# embedding 1280, head 1280, last norm 32; 2592 + 4 · 9432; the last stage has the norm, 2 · 9432 + 1280 (+ 32)
# of two tensor ranks each has half of embedding, head, queries to values, and output: 1312 + 4 · (9432 - 2304)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """``names``: in the order that they came in; ``differ``: those that are not what the file has; ``numbers``: that the rank holds."""

    names: tuple[str, ...]
    differ: tuple[str, ...]
    numbers: int


def trip(order: tuple[str, bool, dict[str, int]]) -> Trip:
    """Loads and exports a model on this rank."""
    from asyncrl.learner.megatron.standins import import_megatron

    model_dir, value_head, sizes = order
    import_megatron()
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from asyncrl.learner.megatron.hf_config import read_config, transformer_config
    from asyncrl.learner.megatron.model import build_chunks
    from asyncrl.learner.megatron.parallel import MegatronLayout, start_parallel
    from asyncrl.learner.megatron.weights import export_tensors, load_weights

    parallel, config = start_parallel(MegatronLayout(**sizes)), read_config(model_dir)
    core = transformer_config(config, parallel.layout, dtype=torch.float32, recompute=False)
    chunks = build_chunks(config, core, parallel, attention=DotProductAttention, value_head=value_head)
    load_weights(chunks, model_dir, config, parallel, value_head=value_head)
    got = dict(export_tensors(chunks, config, parallel, value_head=value_head, dtype=torch.float32))
    file = load_file(Path(model_dir) / "model.safetensors")
    differ = [name for name, tensor in got.items() if name not in file or not torch.equal(tensor, file[name])]
    missing = sorted(file.keys() - got.keys())
    numbers = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    return Trip(names=tuple(got), differ=(*differ, *missing), numbers=numbers)


def round_trip(suite: Suite, folder: Path, family: str, sizes: dict[str, int]) -> list[Trip]:
    order = (write_megatron_model(folder, family), family == "value head", sizes)
    return suite.give(f"the round trip of {family} on {sizes}", sizes["ranks"], trip, order)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_what_was_read_is_exported_again_bit_for_bit(suite: Suite, tmp_path: Path, family: str, layout: str):
    ranks = round_trip(suite, tmp_path, family, LAYOUTS[layout])
    assert [rank.differ for rank in ranks] == [()] * len(ranks)
    assert {rank.names for rank in ranks} == {ranks[0].names}, "every rank gets every tensor in the same order"


@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_that_are_dealt_to_ranks_come_together_again(suite: Suite, tmp_path: Path, layout: str):
    sizes, numbers = EXPERTS[layout]
    ranks = round_trip(suite, tmp_path, "qwen3 moe", sizes)
    assert [rank.differ for rank in ranks] == [()] * len(ranks)
    assert {rank.numbers for rank in ranks} == numbers
