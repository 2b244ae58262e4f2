"""What an engine saves comes back: next steps, other layouts, and the Hugging Face export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_support import batch_of, one_rank, random_groups, rows_of, run_ranks, settings, spec, tiny_model_dir

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import DataError
from asyncrl.learner.checkpoint import CheckpointWriter, Manifest
from asyncrl.learner.control import Control
from asyncrl.learner.export import export_checkpoint
from asyncrl.learner.fsdp2 import FSDP2Engine
from asyncrl.learner.objective import PolicyObjective
from asyncrl.queue.messages import Frontier


def engine_of(model_dir: str) -> FSDP2Engine:
    engine = FSDP2Engine(spec(model_dir, weight_decay=0.01, warmup_steps=4))
    engine.initialize()
    return engine


def train(engine: FSDP2Engine, seed: int, rank: int = 0, world: int = 1) -> tuple[float, float]:
    rows = rows_of(random_groups(4, 4, seed=seed))
    mine = tuple(row for row in rows if row.trajectory.ticket % world == rank)
    batch, objective = batch_of(mine, rows), PolicyObjective(settings(), "behavior")
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
    saving.wait()
    second = engine_of(model_dir)
    second.load(tmp_path / "state")
    assert second.optimizer_steps == 2
    assert not torch.equal(torch.get_rng_state(), state)
    assert [train(second, seed) for seed in range(2, 5)] == expected
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.named_tensors(), second.named_tensors(), strict=True))


def test_a_state_saved_before_the_first_step_loads(tmp_path: Path):
    one_rank()
    model_dir = tiny_model_dir(tmp_path / "model")
    engine_of(model_dir).save(tmp_path / "state").wait()
    loaded = engine_of(model_dir)
    loaded.load(tmp_path / "state")
    assert train(loaded, 0) == train(engine_of(model_dir), 0)


def _save_on_two(rank: int, world: int, model_dir: str, state: str, out: str) -> None:
    engine = engine_of(model_dir)
    for seed in range(2):
        train(engine, seed, rank, world)
    saving = engine.save(Path(state))
    continued = [train(engine, seed, rank, world) for seed in range(2, 5)]
    saving.wait()
    if rank == 0:
        np.save(out, np.array(continued))


@pytest.mark.real
def test_what_two_ranks_saved_one_rank_continues(tmp_path: Path):
    model_dir = tiny_model_dir(tmp_path / "model")
    run_ranks(2, _save_on_two, model_dir, str(tmp_path / "state"), str(tmp_path / "out.npy"))
    one_rank()
    engine = engine_of(model_dir)
    engine.load(tmp_path / "state")
    np.testing.assert_allclose([train(engine, seed) for seed in range(2, 5)], np.load(tmp_path / "out.npy"), rtol=1e-4, atol=1e-6)


def run_with_checkpoint(tmp_path: Path, model_dir: str, engine: FSDP2Engine, dtype: str = "float32") -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.write_config(Config())
    facts = RunFacts(
        run_id="r",
        incarnation=0,
        queue_endpoints=(),
        sync_endpoint="",
        rendezvous="",
        model_dir=model_dir,
        generator_device="cpu",
        learner_device="cpu",
    )
    run_dir.write_facts(facts)
    frontier = Frontier(steps=2, low=8, settled_above=(), trained=8, dropped={})
    manifest = Manifest(run_id="r", step=2, incarnation=0, frontier=frontier, engine="fsdp2", world_size=1, dtype=dtype, versions={})
    writer = CheckpointWriter(engine, Control(0, 1, 1.0), run_dir, 2)
    writer.begin(manifest)
    writer.finish(wait=True)
    return run_dir


@pytest.mark.parametrize("tied", [False, True])
def test_the_export_loads_in_transformers_with_equal_logits(tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    one_rank()
    model_dir = tiny_model_dir(tmp_path / "model", tied=tied)
    (Path(model_dir) / "tokenizer_config.json").write_text("{}")
    engine = engine_of(model_dir)
    for seed in range(2):
        train(engine, seed)
    run_dir = run_with_checkpoint(tmp_path, model_dir, engine)
    out = export_checkpoint(run_dir, run_dir.export)
    assert (out / "tokenizer_config.json").read_text() == "{}"
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.arange(12)[None]
    trained = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    untrained_logits = trained(input_ids=ids).logits
    missing = trained.load_state_dict(dict(engine.named_tensors()), strict=False).missing_keys
    assert missing == list(engine.ties())
    assert torch.equal(exported(input_ids=ids).logits, trained(input_ids=ids).logits)
    assert not torch.equal(exported(input_ids=ids).logits, untrained_logits)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118 - not a mapping
    monkeypatch.setattr("asyncrl.learner.export.SHARD_BYTES", 30_000)
    export_checkpoint(run_dir, run_dir.export)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(exported(input_ids=ids).logits, again(input_ids=ids).logits)


def test_a_bfloat16_run_exports_what_its_generators_sample_from(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    one_rank()
    model_dir = tiny_model_dir(tmp_path / "model")
    engine = FSDP2Engine(spec(model_dir, dtype="bfloat16"))
    engine.initialize()
    train(engine, 0)
    run_dir = run_with_checkpoint(tmp_path, model_dir, engine, dtype="bfloat16")
    exported = dict(AutoModelForCausalLM.from_pretrained(export_checkpoint(run_dir, tmp_path / "out")).named_parameters())
    for name, tensor in engine.named_tensors():
        assert exported[name].dtype == torch.bfloat16
        assert torch.equal(exported[name], tensor)


def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path: Path):
    with pytest.raises(DataError, match="no whole checkpoint"):
        export_checkpoint(RunDir(tmp_path), tmp_path / "out")


def test_a_folder_of_other_files_is_not_overwritten(tmp_path: Path):
    one_rank()
    model_dir = tiny_model_dir(tmp_path / "model")
    run_dir = run_with_checkpoint(tmp_path, model_dir, engine_of(model_dir))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(DataError, match="holds other files"):
        export_checkpoint(run_dir, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"
