from typing import get_args

import pytest

from asyncrl.config import Config, LearnerConfig
from asyncrl.config.compose import compose, override
from asyncrl.config.engine_options import LEFT_OUT
from asyncrl.config.names import option_names
from asyncrl.config.refusals import REFUSED_NAMES, REFUSED_VALUES
from asyncrl.errors import ConfigError, UnsupportedError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("generator.top_k=5", "renormalise .*nearest that works: generator.temperature"),
        ("algorithm.kl_coef=0.1", "a run scores no reference policy.*algorithm.clip_high"),
        ("learner.pipeline_parallel=2", r"with learner.engine=fsdp2 is not supported \(pipeline parallel\).*learner.engine=megatron"),
        ("learner.context_parallel=2", r"\(context parallel\).*learner.sequence_parallel, or learner.engine=megatron"),
        ("learner.expert_parallel=2", r"\(expert parallel\).*learner.engine=megatron"),
        ("learner.virtual_pipeline=2", r"\(interleaved pipeline\).*learner.engine=megatron"),
        ("actor_rollout_ref.actor.router_replay.mode=R3", r"\(router replay\).*algorithm.correction=mask"),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", r"\(router replay\)"),
        ("actor_rollout_ref.hybrid_engine=True", r"\(roles that take turns on a GPU\).*generator.num_gpus, learner.num_gpus"),
        ("launch.colocate=true", r"\(roles that take turns on a GPU\)"),
        ("critic.optim.lr=1e-5", "a run trains the actor alone.*algorithm.advantage"),
        ("learner.engine=automodel", "learner.engine=automodel is not supported: no engine of this name is built; .*learner.engine=fsdp2"),
        ("learner=torchtitan", "learner.engine=torchtitan is not supported: .*learner.engine=fsdp2"),
        ("learner.device=npu", "learner.device=npu is not supported: engines are registered for cpu and cuda alone; .*learner.device=auto"),
        ("learner.attention=flash_attention_2", "takes no mask.*learner.attention=sdpa"),
        ("model.dtype=float16", "scales the loss.*model.dtype=bfloat16"),
    ],
)
def test_what_is_left_out_on_purpose_is_refused_with_the_nearest_that_works(text, said):
    with pytest.raises(UnsupportedError, match=said):
        compose([text])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.ranks=4", "learner.tensor_parallel=2", "learner.sequence_parallel=2"], "both cut the attention heads"),
        (["learner.ranks=4", "learner.tensor_parallel=2", "learner.shard_ranks=2"], "nearest that works: learner.shard_ranks=0"),
        (["learner.ranks=2", "learner.tensor_parallel=2", "learner.lora_rank=8"], "nearest that works: learner.tensor_parallel=1"),
    ],
)
def test_layouts_are_refused_when_options_are_read(overrides, said):
    with pytest.raises(UnsupportedError, match=said):
        override(Config(), overrides)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("sequence_parallel=2", r"\(Ulysses sequence parallel\).*learner.context_parallel"),
        ("shard_ranks=2", "its distributed optimizer shards over all.*learner.shard_ranks=0"),
        ("offload=true", r"\(CPU offload\).*learner.engine=fsdp2"),
        ("lora_rank=4", r"\(LoRA\).*learner.engine=fsdp2"),
        ("attention=eager", r"learner.attention=eager with learner.engine=megatron is not supported.*learner.attention=sdpa"),
    ],
)
def test_what_megatron_has_not_is_refused_with_the_nearest_that_works(option, said):
    with pytest.raises(UnsupportedError, match=said):
        compose(["learner=megatron", "learner.ranks=2", f"learner.{option}"])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("pipeline_parallel=2", r"learner.router_loss=0.1 with learner.pipeline_parallel=2 .*means over the layers of all stages"),
        ("activation_checkpointing=true", r"\(a router's loss with activation checkpointing\).*learner.activation_checkpointing=false"),
    ],
)
def test_a_routers_loss_that_megatron_would_not_see_whole_is_refused(option, said):
    with pytest.raises(UnsupportedError, match=said):
        compose(["learner=megatron", "learner.ranks=2", "learner.router_loss=0.1", f"learner.{option}"])
    compose(["learner.router_loss=0.1", "learner.activation_checkpointing=true"])


def test_what_fsdp2_has_not_is_taken_under_megatron():
    sizes = ["tensor_parallel=2", "pipeline_parallel=2", "virtual_pipeline=2", "context_parallel=2", "expert_parallel=2"]
    learner = compose(["learner=megatron", "learner.ranks=8", *(f"learner.{size}" for size in sizes)]).learner
    assert (learner.engine, learner.pipeline_parallel, learner.virtual_pipeline) == ("megatron", 2, 2)


def test_each_option_that_an_engine_has_not_is_one_and_each_engine_says_which():
    assert set(LEFT_OUT) == set(get_args(LearnerConfig.model_fields["engine"].annotation))
    assert {f"learner.{name}" for options in LEFT_OUT.values() for name in options} <= set(option_names())


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("learner.tensor_model_parallel_size", "learner.tensor_parallel"),
        ("learner.pipeline_model_parallel_size", "learner.pipeline_parallel"),
        ("actor_rollout_ref.actor.megatron.context_parallel_size", "learner.context_parallel"),
        ("actor_rollout_ref.actor.megatron.expert_model_parallel_size", "learner.expert_parallel"),
    ],
)
def test_another_programs_name_of_a_layout_is_answered_with_ours(name, ours):
    with pytest.raises(ConfigError, match=f"did you mean .*{ours}"):
        override(Config(), [f"{name}=2"])


def test_a_stored_configuration_is_held_to_the_same_refusals():
    with pytest.raises(UnsupportedError, match="engines are registered for cpu and cuda alone"):
        override(Config(), ["learner.device=npu"])


def test_refusals_name_what_is_no_option_and_values_of_what_is_one():
    assert not set(option_names()) & set(REFUSED_NAMES)
    assert set(REFUSED_VALUES) <= set(option_names())


def test_the_nearest_that_works_does_work():
    nearest = {refusal.nearest for refusals in REFUSED_VALUES.values() for refusal in refusals.values()}
    override(Config(), sorted(nearest))


def test_two_interleaved_stages_are_refused_on_gpus_and_more_are_not():
    layout = ["learner=megatron", "learner.ranks=4", "learner.virtual_pipeline=2"]
    with pytest.raises(UnsupportedError, match=r"virtual_pipeline=2 with learner.pipeline_parallel=2 .*NCCL cannot tell an activation"):
        compose([*layout, "learner.pipeline_parallel=2", "learner.device=cuda"])
    compose([*layout, "learner.pipeline_parallel=2", "learner.device=cpu"])
    compose([*layout, "learner.pipeline_parallel=4", "learner.device=cuda"])
