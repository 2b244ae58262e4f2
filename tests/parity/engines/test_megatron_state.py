"""What a Megatron engine's checkpoint holds beside what the chains of layouts prove: each number once, generators, and no other model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config import LearnerConfig
from asyncrl.errors import DataError
from asyncrl.learner.engine import EngineSpec
from asyncrl.learner.registry import EngineRegistry
from engines.megatron_models import write_megatron_model
from engines.suite import Suite

pytestmark = pytest.mark.real


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An engine on ``model_dir``, and a folder to save to; ``other_dir``: of the model that is to refuse it."""

    model_dir: str
    checkpoint: str
    learner: Mapping[str, Any] = field(default_factory=dict)
    other_dir: str = ""


def engine_on(model_dir: str, learner: Mapping[str, Any]) -> Any:
    settings = LearnerConfig(engine="megatron", ranks=torch.distributed.get_world_size(), **learner)
    kind: Any = EngineRegistry.find(model_type="language_model", backend="megatron", device="cpu")
    engine = kind(EngineSpec(model_dir=model_dir, dtype="float32", device="cpu", learner=settings))
    engine.initialize()
    return engine


def numbers_written(order: Order) -> int:
    """How many a rank would write, but for scalars and generators."""
    from asyncrl.learner.megatron.state import own_copies

    copies = own_copies(engine_on(order.model_dir, order.learner)._state())
    return sum(shard._sh_ten.data.numel() for held in copies.values() for shard in getattr(held, "_local_shards", ()))


def drawn_before_and_after(order: Order) -> tuple[list[float], list[float]]:
    """Three random numbers after saving, and again after loading."""
    engine = engine_on(order.model_dir, order.learner)
    torch.manual_seed(7 + torch.distributed.get_rank())
    assert engine.save(Path(order.checkpoint)).wait(60.0)
    before = torch.rand(3).tolist()
    engine.load(Path(order.checkpoint))
    return before, torch.rand(3).tolist()


def refusal(order: Order) -> str:
    """Why a model does not load what another one has saved."""
    assert engine_on(order.model_dir, order.learner).save(Path(order.checkpoint)).wait(60.0)
    other = engine_on(order.other_dir, order.learner)
    before = [parameter.detach().clone() for chunk in other.chunks for parameter in chunk.parameters()]
    try:
        other.load(Path(order.checkpoint))
    except DataError as error:
        after = [parameter for chunk in other.chunks for parameter in chunk.parameters()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "nothing is read then"
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("family", "ranks", "learner"),
    [
        ("llama", 2, {}),
        ("qwen2 tied", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
        ("qwen3 moe", 4, {"tensor_parallel": 2, "expert_parallel": 2}),
    ],
)
def test_each_weight_and_moment_is_written_by_one_rank(suite: Suite, tmp_path: Path, family: str, ranks: int, learner: dict[str, Any]):
    model_dir = write_megatron_model(tmp_path / "model", family)
    order = Order(model_dir=model_dir, checkpoint="", learner=learner)
    written = suite.give(f"what ranks write of {family}", ranks, numbers_written, order)
    of_model = sum(tensor.numel() for tensor in load_file(tmp_path / "model" / "model.safetensors").values())
    assert sum(written) == 3 * of_model
    assert max(written) < 0.75 * sum(written), "ranks that hold the same take turns"


def test_generators_go_on_where_the_checkpoint_was_written(suite: Suite, tmp_path: Path):
    order = Order(model_dir=write_megatron_model(tmp_path / "model", "llama"), checkpoint=str(tmp_path / "state"))
    (first, first_again), (second, second_again) = suite.give("generators", 2, drawn_before_and_after, order)
    assert first == first_again and second == second_again
    assert first != second


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("qwen2", "lacks 48 of .* tensors, adam_step.model.layers.0.self_attn.k_proj.bias first"),
        ("llama tied", "met 4 others, adam_step.lm_head.weight first"),
        ("llama wide", r"model.model.layers.0.mlp.gate_proj.weight has the shape \(64, 32\) in this model; met \(48, 32\)"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused_before_anything_is_read(suite: Suite, tmp_path: Path, other: str, said: str):
    order = Order(
        model_dir=write_megatron_model(tmp_path / "model", "llama"),
        other_dir=write_megatron_model(tmp_path / "other", other),
        checkpoint=str(tmp_path / "state"),
        learner={"pipeline_parallel": 2},
    )
    for answer in suite.give(f"a checkpoint of llama for {other}", 2, refusal, order):
        assert re.search(said, answer), answer
