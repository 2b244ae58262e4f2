import pytest

from asyncrl.config.layout import Layout, check_layout, check_model_layout
from asyncrl.errors import ConfigError, UnsupportedError

DENSE = {"num_attention_heads": 12, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [
        (Layout(ranks=1), 1),
        (Layout(ranks=4, shard_ranks=2), 4),
        (Layout(ranks=4, shard_ranks=4, lora_rank=8), 4),
        (Layout(ranks=4, tensor_parallel=2), 2),
        (Layout(ranks=6, sequence_parallel=3, lora_rank=8), 2),
    ],
)
def test_layouts_that_divide_are_let_through_and_count_their_replicas(layout, replicas):
    check_layout(layout)
    assert layout.data_parallel == replicas


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(ranks=5, tensor_parallel=2), "learner.tensor_parallel; met 5 and 2: set learner.ranks=6, or learner.tensor_parallel=1"),
        (
            Layout(ranks=6, sequence_parallel=4),
            "learner.sequence_parallel; met 6 and 4: set learner.ranks=8, or learner.sequence_parallel=3",
        ),
        (Layout(ranks=2, tensor_parallel=4), "met 2 and 4: set learner.ranks=4, or learner.tensor_parallel=2"),
        (Layout(ranks=6, shard_ranks=4), "divides learner.ranks; met 4 and 6: set learner.shard_ranks=3, or 0 to shard over all"),
        (Layout(ranks=2, shard_ranks=4), "met 4 and 2: set learner.shard_ranks=2"),
    ],
)
def test_ranks_that_do_not_divide_are_refused_with_numbers_that_do(layout, said):
    with pytest.raises(ConfigError, match=said):
        check_layout(layout)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(ranks=4, tensor_parallel=2, sequence_parallel=2), "both cut the attention heads.*learner.tensor_parallel or .* alone"),
        (Layout(ranks=4, tensor_parallel=2, shard_ranks=2), "learner.shard_ranks=2 with learner.tensor_parallel=2.*learner.shard_ranks=0"),
        (Layout(ranks=4, sequence_parallel=2, shard_ranks=2), "learner.shard_ranks=2 with learner.sequence_parallel=2"),
        (Layout(ranks=2, tensor_parallel=2, lora_rank=4), "learner.lora_rank=4 with learner.tensor_parallel=2.*learner.tensor_parallel=1"),
    ],
)
def test_combinations_without_an_implementation_are_refused_by_name_with_the_nearest(layout, said):
    with pytest.raises(UnsupportedError, match=said):
        check_layout(layout)


@pytest.mark.parametrize(
    ("sizes", "description"),
    [
        ({"tensor_parallel": 4}, DENSE),
        ({"tensor_parallel": 6}, {"num_attention_heads": 12}),  # no grouping: as many key/value heads
        ({"tensor_parallel": 2}, {"text_config": DENSE}),
        ({"sequence_parallel": 12}, DENSE),  # each key/value head lies on three ranks
        ({"sequence_parallel": 2}, {**DENSE, "num_experts": 8}),
        ({}, {"num_experts": 8}),
    ],
)
def test_heads_that_can_be_dealt_are_let_through(sizes, description):
    check_model_layout(Layout(ranks=12, **sizes), description)


@pytest.mark.parametrize(
    ("sizes", "description", "said"),
    [
        ({"tensor_parallel": 6}, DENSE, "12 attention heads and 4 key/value heads evenly; met 6: set it to 1 or 2 or 4"),
        ({"tensor_parallel": 12}, DENSE, "met 12"),
        ({"sequence_parallel": 8}, DENSE, "learner.sequence_parallel .* met 8: set it to 1 or 2 or 4 or 12"),
        ({"sequence_parallel": 6}, DENSE, "met 6"),  # 6 ranks cannot share 4 heads
        ({"tensor_parallel": 2}, {"hidden_size": 64}, "config.json tells no number of them"),
    ],
)
def test_heads_that_cannot_be_dealt_are_refused_with_the_sizes_that_can(sizes, description, said):
    with pytest.raises(ConfigError, match=said):
        check_model_layout(Layout(ranks=24, **sizes), description)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_under_tensor_parallel_are_refused_with_the_nearest(name):
    with pytest.raises(UnsupportedError, match=r"a model with 8 experts.*learner.tensor_parallel=1"):
        check_model_layout(Layout(ranks=2, tensor_parallel=2), {**DENSE, name: 8})


LAYERS = {"model_type": "qwen3", "num_hidden_layers": 8, **DENSE, "head_dim": 24, "intermediate_size": 48, "vocab_size": 96}
EXPERTS = {**LAYERS, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 24}


def megatron(ranks=1, **sizes):
    return Layout(engine="megatron", ranks=ranks, **sizes)


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [
        (megatron(8, tensor_parallel=2, pipeline_parallel=2), 2),
        (megatron(8, tensor_parallel=2, context_parallel=2, pipeline_parallel=2, virtual_pipeline=4), 1),
        (megatron(4, expert_parallel=4), 4),  # experts are dealt to ranks that train different rows
        (megatron(4, tensor_parallel=2, expert_parallel=4), 2),  # and to those that cut the matrices
    ],
)
def test_megatron_takes_layouts_that_divide_and_counts_their_replicas(layout, replicas):
    check_layout(layout)
    assert layout.data_parallel == replicas


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (megatron(6, tensor_parallel=2, pipeline_parallel=2), "met 6 and 2 × 2 × 1: set learner.ranks=8"),
        (megatron(2, virtual_pipeline=2), "met 2 with learner.pipeline_parallel=1: set learner.virtual_pipeline=1, or"),
        (
            megatron(4, pipeline_parallel=2, expert_parallel=4),
            "2 ranks of a stage; met 4: set learner.expert_parallel=2, or learner.ranks=8",
        ),
        (megatron(6, expert_parallel=4), "6 ranks of a stage; met 4: set learner.expert_parallel=3, or learner.ranks=8"),
    ],
)
def test_megatron_refuses_ranks_that_do_not_divide_with_numbers_that_do(layout, said):
    with pytest.raises(ConfigError, match=said):
        check_layout(layout)


@pytest.mark.parametrize(
    ("layout", "description"),
    [
        (megatron(4, tensor_parallel=4), LAYERS),
        (megatron(12, tensor_parallel=12), LAYERS),  # each key/value head serves three ranks
        (megatron(4, pipeline_parallel=4, virtual_pipeline=2), LAYERS),
        (megatron(3, context_parallel=3), LAYERS),  # no head is cut
        (megatron(8, expert_parallel=8), EXPERTS),
        (megatron(2, tensor_parallel=2), EXPERTS),
        (megatron(8, tensor_parallel=2, expert_parallel=8), {**EXPERTS, "intermediate_size": 49, "moe_intermediate_size": 25}),  # not cut
    ],
)
def test_megatron_takes_models_that_can_be_dealt(layout, description):
    check_model_layout(layout, description)


@pytest.mark.parametrize(
    ("layout", "description", "said"),
    [
        (megatron(6, tensor_parallel=6), LAYERS, "met 6 and 4 key/value heads: set it to 1 or 2 or 4 or 12"),
        (megatron(4, tensor_parallel=4), {**LAYERS, "vocab_size": 98}, "met 4 and 98 vocab_size: set it to 1 or 2"),
        (megatron(8, tensor_parallel=8), LAYERS, "met 8 and 12 attention heads: set it to"),
        (
            megatron(12, tensor_parallel=12),
            {**LAYERS, "head_dim": 32},
            "met 12 and 640 rows of queries, keys and values: set it to 1 or 2 or 4",
        ),
        (megatron(3, pipeline_parallel=3), LAYERS, "the model's 8 layers evenly; met 3 × 1: set learner.pipeline_parallel=2"),
        (megatron(4, pipeline_parallel=4, virtual_pipeline=4), LAYERS, "met 4 × 4: set learner.pipeline_parallel=2"),
        (megatron(2, pipeline_parallel=2, virtual_pipeline=3), LAYERS, "met 2 × 3: set learner.virtual_pipeline=1"),
        (megatron(3, expert_parallel=3), EXPERTS, "8 experts evenly; met 3: set it to 1 or 2 or 4 or 8"),
        (megatron(2, expert_parallel=2), LAYERS, "the model has none; met 2: set it to 1"),
    ],
)
def test_megatron_refuses_what_cannot_be_dealt_with_the_sizes_that_can(layout, description, said):
    with pytest.raises(ConfigError, match=said):
        check_model_layout(layout, description)


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({"model_type": "gemma3_text"}, "model_type='gemma3_text'"),
        ({"model_type": None}, "model_type=''"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear'"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok=1 and norm_topk_prob=true"),
        ({"model_type": "llava", "text_config": {**LAYERS, "model_type": "llama"}}, "model_type='llava'"),
    ],
)
def test_megatron_refuses_models_that_its_layers_do_not_make(changed, met):
    with pytest.raises(UnsupportedError, match=f"a model with {met} under .*llama, qwen2, qwen3, qwen3_moe.*learner.engine=fsdp2"):
        check_model_layout(megatron(), {**EXPERTS, **changed})


def test_megatron_takes_scaled_positions_of_llama_in_either_spelling():
    for name in ("rope_parameters", "rope_scaling"):
        check_model_layout(megatron(), {**LAYERS, "model_type": "llama", name: {"rope_type": "llama3", "factor": 8.0}})
