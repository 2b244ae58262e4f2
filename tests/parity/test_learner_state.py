"""What an engine saves comes back on as many ranks, and nowhere else than where it fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from learner_support import batch_of, one_rank, random_groups, rows_of, settings, spec, tiny_model_dir

from asyncrl.errors import DataError
from asyncrl.learner.fsdp2 import FSDP2Engine
from asyncrl.learner.objective import PolicyObjective


def engine_of(model_dir: str, **learner: int) -> FSDP2Engine:
    engine = FSDP2Engine(spec(model_dir, weight_decay=0.01, warmup_steps=4, **learner))
    engine.initialize()
    return engine


def train(engine: FSDP2Engine, seed: int) -> tuple[float, float]:
    batch, objective = batch_of(rows_of(random_groups(4, 4, seed=seed))), PolicyObjective(settings(), "behavior")
    output = engine.train_batch(
        batch, objective, should_stop=lambda: False, rescale=lambda sums: objective.rescale(sums, batch.denominators)
    )
    return float(output.sums[3]), output.grad_norm


@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_engine_continues_bit_for_bit(tmp_path: Path, tied: bool):
    one_rank()
    model_dir = tiny_model_dir(tmp_path / "model", tied=tied)
    first = engine_of(model_dir)
    for seed in range(2):
        train(first, seed)
    saving = first.save(tmp_path / "state")
    torch.rand(3)
    state = torch.get_rng_state()
    expected = [train(first, seed) for seed in range(2, 5)]  # while the state is written
    assert saving.wait(60.0)
    second = engine_of(model_dir)
    second.load(tmp_path / "state")
    assert second.optimizer_steps == 2
    assert not torch.equal(torch.get_rng_state(), state)
    assert [train(second, seed) for seed in range(2, 5)] == expected
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.named_tensors(), second.named_tensors(), strict=True))


def test_a_state_saved_before_the_first_step_loads(tmp_path: Path):
    one_rank()
    model_dir = tiny_model_dir(tmp_path / "model")
    engine_of(model_dir).save(tmp_path / "state").wait(60.0)
    loaded = engine_of(model_dir)
    loaded.load(tmp_path / "state")
    assert train(loaded, 0) == train(engine_of(model_dir), 0)


def test_what_is_written_is_what_was_there_when_the_save_began(tmp_path: Path):
    one_rank()
    model_dir = tiny_model_dir(tmp_path / "model")
    engine, loaded = engine_of(model_dir), engine_of(model_dir)
    train(engine, 0)
    before = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    saving = engine.save(tmp_path / "state")
    for parameter, moments in engine.optimizer.state.items():
        for tensor in (parameter.detach(), moments["exp_avg"], moments["exp_avg_sq"]):
            tensor.zero_()
    assert saving.wait(60.0)
    loaded.load(tmp_path / "state")
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.named_tensors())
    assert all(moments["exp_avg"].abs().sum() > 0 for moments in loaded.optimizer.state.values())


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ({"lora_rank": 4}, {"lora_rank": 8}, r"lora_A.default.weight has the shape \(8, 64\) in this model; met \(4, 64\) in .*lora_rank"),
        ({"lora_rank": 4}, {}, r"lacks \d+ of \d+ tensors, adam_step.lm_head.weight first"),
        ({}, {"lora_rank": 4}, r"lacks \d+ of \d+ tensors, adam_step.model.layers.0.mlp.down_proj.lora_A.default.weight first"),
    ],
    ids=["adapters of another rank", "adapters into none", "no adapters into some"],
)
def test_a_state_of_other_adapters_is_refused(tmp_path: Path, saved: dict[str, int], loaded: dict[str, int], message: str):
    one_rank()
    model_dir = tiny_model_dir(tmp_path / "model")
    engine_of(model_dir, **saved).save(tmp_path / "state").wait(60.0)
    engine = engine_of(model_dir, **loaded)
    before = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    with pytest.raises(DataError, match=message):
        engine.load(tmp_path / "state")
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_tensors())


def test_a_state_with_more_layers_than_the_model_is_refused(tmp_path: Path):
    one_rank()
    model_dir = tiny_model_dir(tmp_path / "model")
    engine_of(model_dir).save(tmp_path / "state").wait(60.0)
    config = json.loads((Path(model_dir) / "config.json").read_text())
    (Path(model_dir) / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    with pytest.raises(DataError, match=r"met \d+ others, adam_step.model.layers.1.\S+ first: use the model"):
        engine_of(model_dir).load(tmp_path / "state")
