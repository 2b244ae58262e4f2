import json
import socket
from importlib import metadata

import pytest

from asyncrl.config.compose import compose
from asyncrl.errors import ConfigError, UnsupportedError
from asyncrl.launch import preflight


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(preflight, "num_gpus", lambda: 0)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sync.every=4"], "4 - 1 .* = 3; met 2"),
        (["queue.window=40"], "ceil\\(39 / 16\\) \\+ 1 - 1 = 3; met 2"),
        (["algorithm.group_size=1", "algorithm.no_signal=keep"], "advantage 0"),
        (["algorithm.mini_batches=17"], "at least one group"),
        (["learner.micro_batch_tokens=64"], "less than one response"),
        (["learner.device=cuda"], "learner.device is cuda, but this machine shows no NVIDIA GPU"),
        (["generator.python=/nowhere/python"], "not an executable"),
        (["task=copy", "task.name=jsonl", "task.path=/nowhere.jsonl"], "nowhere.jsonl"),
        (["queue=lockstep", "sync.every=2"], "lockstep needs sync.every=1"),
    ],
)
def test_what_cannot_live_is_refused_with_the_numbers(overrides, said):
    with pytest.raises(ConfigError, match=said):
        preflight.check_config(compose(overrides))


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"queue.port: {port} is not free"):
            preflight.check_config(compose(["queue.transport=tcp", f"queue.port={port}"]))


def test_more_gpu_shares_than_gpus_are_refused_before_ray_waits_for_them(monkeypatch):
    monkeypatch.setattr(preflight, "num_gpus", lambda: 1)
    with pytest.raises(ConfigError, match=r"1.5 GPUs are asked for and 1 are here"):
        preflight.check_config(compose(["generator.replicas=2"]))
    preflight.check_config(compose([]))
    with pytest.raises(ConfigError, match="a GPU for each rank"):
        preflight.check_config(compose(["learner.ranks=2", "learner.num_gpus=0.25"]))


def test_lengths_are_held_against_the_models_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    preflight.check_model(compose(["generator.max_new_tokens=8"]), tmp_path)
    with pytest.raises(ConfigError, match="exceeds the model's 64 positions"):
        preflight.check_model(compose(["generator.max_model_len=65", "generator.max_new_tokens=8"]), tmp_path)
    with pytest.raises(ConfigError, match="leaves no room for a prompt within 64"):
        preflight.check_model(compose(["generator.max_new_tokens=64"]), tmp_path)


def test_a_layout_is_held_against_the_models_heads_and_experts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6, "num_key_value_heads": 3}))
    four = compose(["learner.ranks=4", "learner.tensor_parallel=4", "generator.max_new_tokens=8"])
    with pytest.raises(ConfigError, match="6 attention heads and 3 key/value heads evenly; met 4: set it to 1 or 3"):
        preflight.check_model(four, tmp_path)
    with pytest.raises(UnsupportedError, match=r"router_loss=0.01 is not supported: the model has no experts"):
        preflight.check_model(compose(["learner.router_loss=0.01"]), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_experts": 8}))
    preflight.check_model(compose(["learner.router_loss=0.01"]), tmp_path)
    with pytest.raises(UnsupportedError, match="with 8 experts is not supported"):
        preflight.check_model(four, tmp_path)


@pytest.mark.parametrize("recipe", ["tiny", "arithmetic", "chain_sum"])
@pytest.mark.parametrize("queue", ["async", "lockstep", "synchronous"])
def test_every_recipe_can_live_under_every_schedule(recipe, queue):
    preflight.check_config(compose([f"recipe={recipe}", f"queue={queue}"]))


def test_what_decides_the_prompts_cannot_change_in_a_resumed_run():
    from asyncrl.launch.start import check_same_run

    old = compose(["recipe=tiny"])
    check_same_run(old, compose(["recipe=tiny", "launch.steps=7", "learner.learning_rate=1e-4"]))
    with pytest.raises(ConfigError, match=r"task\.seed, task\.shuffle cannot change"):
        check_same_run(old, old.model_copy(update={"task": old.task.model_copy(update={"seed": 1, "shuffle": False})}))


def test_megatron_is_held_against_what_is_installed_and_the_gpus_that_are_seen(monkeypatch):
    megatron = compose(["recipe=tiny", "learner=megatron", "generator.device=cpu", "learner.device=cpu"])
    preflight.check_config(megatron)
    monkeypatch.setattr(preflight, "num_gpus", lambda: 2)
    with pytest.raises(
        UnsupportedError, match=r"learner.device=cpu with learner.engine=megatron .*beside the 2 GPUs.*CUDA_VISIBLE_DEVICES= or"
    ):
        preflight.check_config(megatron)
    interleaved = ["learner.ranks=2", "learner.pipeline_parallel=2", "learner.virtual_pipeline=2"]
    with pytest.raises(UnsupportedError, match="interleaved pipeline of two stages on GPUs"):
        preflight.check_config(compose(["recipe=tiny", "learner=megatron", "generator.device=cpu", *interleaved]))
    monkeypatch.setattr(preflight, "num_gpus", lambda: 0)
    monkeypatch.setattr(metadata, "version", lambda name: "0.17.0")
    with pytest.raises(UnsupportedError, match=r"megatron-core is 0.16.1 or 0.19.2; met 0.17.0"):
        preflight.check_config(megatron)
    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(
        ConfigError, match=r"megatron-core is not installed: pip install 'asyncrl\[megatron\]', or set learner.engine=fsdp2"
    ):
        preflight.check_config(megatron)


def absent(name):
    raise metadata.PackageNotFoundError(name)


def test_a_resumed_run_may_go_on_under_another_engine_and_layout():
    from asyncrl.launch.start import check_same_run

    check_same_run(compose(["recipe=tiny"]), compose(["recipe=tiny", "learner=megatron", "learner.ranks=2", "learner.tensor_parallel=2"]))


def test_what_an_adapter_counts_cannot_change_in_a_resumed_run():
    from asyncrl.launch.start import check_same_run

    old = compose(["recipe=tiny", "learner.lora_rank=4"])
    with pytest.raises(ConfigError, match=r"learner\.lora_alpha cannot change"):
        check_same_run(old, compose(["recipe=tiny", "learner.lora_rank=4", "learner.lora_alpha=8"]))
