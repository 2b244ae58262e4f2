"""Where parameters of Megatron-core come from, worked out by hand; nothing here needs Megatron-core."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncrl.errors import DataError
from asyncrl.learner.megatron.names import Entry, entries
from asyncrl.learner.megatron.parallel import MegatronLayout
from asyncrl.learner.megatron.shards import compose, decompose, shards_of
from asyncrl.learner.megatron.weights import check_names

# four query heads over two key/value heads, two numbers in each
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 8,
    "hidden_size": 3,
    "intermediate_size": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "tie_word_embeddings": False,
}


def entry_of(name: str, layout: MegatronLayout, **changed: object) -> Entry:
    found = [entry for entry in entries(SimpleNamespace(**SMALL | changed), layout, value_head=False) if entry.files[0].name == name]
    assert len(found) == 1
    return found[0]


def rows(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(-1, 3)


QUERIES, KEYS, VALUES = rows(0, 8), rows(100, 4), rows(200, 4)


@pytest.mark.parametrize(
    ("tensor", "rank", "expected"),
    [
        # each key/value head: the four rows of its two query heads, its two key rows, its two value rows
        (1, 0, [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]),
        (2, 1, [4, 5, 6, 7, 102, 103, 202, 203]),
        # more ranks than key/value heads: the second of a head's two ranks has its key and its value, the first its queries
        (4, 2, [4, 5, 6, 7]),
        (4, 3, [102, 103, 202, 203]),
    ],
)
def test_queries_keys_and_values_are_one_parameter_by_key_value_head(tensor: int, rank: int, expected: list[int]):
    entry = entry_of("model.layers.0.self_attn.q_proj.weight", MegatronLayout(ranks=tensor, tensor=tensor))
    parts = [whole[box] for whole, box in zip((QUERIES, KEYS, VALUES), entry.boxes(rank), strict=True)]
    mixed = entry.mixed(parts)
    assert mixed[:, 0].tolist() == expected
    assert tuple(mixed.shape) == entry.shape
    assert all(torch.equal(part, again) for part, again in zip(parts, entry.unmixed(mixed, rank), strict=True))


def test_gate_and_up_are_halved_before_they_lie_behind_each_other():
    entry = entry_of("model.layers.0.mlp.gate_proj.weight", MegatronLayout(ranks=2, tensor=2))
    parts = [whole[box] for whole, box in zip((rows(0, 4), rows(100, 4)), entry.boxes(1), strict=True)]
    assert entry.mixed(parts)[:, 0].tolist() == [2, 3, 102, 103]


def test_layers_go_round_the_stages_when_each_has_two_chunks():
    layout = MegatronLayout(ranks=2, pipeline=2, chunks=2)
    places = [entry_of(f"model.layers.{layer}.input_layernorm.weight", layout) for layer in range(4)]
    assert [(place.stage, place.chunk) for place in places] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {place.name for place in places} == {"decoder.layers.0.input_layernorm.weight"}


def test_a_tied_head_is_a_copy_on_the_last_stage_and_nothing_on_a_single_one():
    tied = SimpleNamespace(**SMALL | {"tie_word_embeddings": True})
    pipeline = list(entries(tied, MegatronLayout(ranks=2, pipeline=2), value_head=False))
    assert (pipeline[-1].name, pipeline[-1].files[0].name, pipeline[-1].copy) == ("output_layer.weight", "model.embed_tokens.weight", True)
    assert not any(entry.copy for entry in entries(tied, MegatronLayout(ranks=1), value_head=False))


def test_an_expert_is_one_slice_of_a_checkpoint_tensor_of_all_experts():
    layout = MegatronLayout(ranks=2, expert=2)
    changed = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 5}
    entry = entry_of("model.layers.1.mlp.experts.3.gate_proj.weight", layout, **changed)
    assert (entry.expert_rank, entry.name) == (1, "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight")
    (shard,) = shards_of(entry, 0)
    assert (shard.name, shard.shape) == ("model.layers.1.mlp.experts.gate_up_proj", (4, 10, 3))
    assert shard.box == (slice(3, 4), slice(0, 10), slice(0, 3))
    weight = torch.randn(entry.shape)
    assert torch.equal(compose(entry, decompose(entry, weight, 0)), weight)


def test_ranks_of_a_replica_are_told_by_stage_context_and_tensor():
    layout = MegatronLayout(ranks=16, tensor=2, context=2, pipeline=2)
    assert layout.data == 2
    assert layout.replica(1) == [4, 5, 6, 7, 12, 13, 14, 15]


def test_a_folder_may_hold_what_old_files_keep_of_positions_and_nothing_else_that_has_no_place():
    config, parallel = SimpleNamespace(**SMALL), SimpleNamespace(layout=MegatronLayout(ranks=1))
    files = {file.name: Path("f") for entry in entries(config, parallel.layout, value_head=False) for file in entry.files}
    files["model.layers.0.self_attn.rotary_emb.inv_freq"] = Path("f")
    check_names(files, Path("folder"), config, parallel, False)
    with pytest.raises(DataError, match=r"folder has 1 tensors that qwen3 has no place for, model.layers.0.extra first"):
        check_names(files | {"model.layers.0.extra": Path("f")}, Path("folder"), config, parallel, False)
    del files["model.norm.weight"]
    with pytest.raises(DataError, match=r"folder lacks 1 of \d+ tensors of qwen3, model.norm.weight first"):
        check_names(files, Path("folder"), config, parallel, False)
