"""The Hugging Face folder of a run: what transformers reads from it is what the engine trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines.models import write_model
from export_support import LORA, run_with_checkpoint, trained_engine
from learner_support import batch_of, one_rank, random_groups, rows_of, spec, tiny_model_dir
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir
from asyncrl.errors import DataError
from asyncrl.learner.export import export_checkpoint
from asyncrl.learner.fsdp2 import FSDP2Engine


def in_transformers(folder: Path | str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def masters(engine: FSDP2Engine) -> dict[str, torch.Tensor]:
    """Float32 weights by the names of the loaded model."""
    named = {name: parameter.detach() for name, parameter in engine.packed.model.named_parameters()}
    return {name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for name, parameter in named.items()}


def assert_scores_are_those_of(engine: FSDP2Engine, exported: Any) -> None:
    """Log-probs of every sampled token, from the engine and from a plain forward pass."""
    batch = batch_of(rows_of(random_groups(2, 2, seed=5)))
    scored = engine.infer_batch(batch, should_stop=lambda: False).predictions_N
    for row, found in zip(batch.rows_N, scored, strict=True):
        ids = torch.from_numpy(row.trajectory.input_ids.astype("int64"))
        expected = exported(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        sampled = torch.from_numpy(row.trajectory.loss_mask.copy())
        torch.testing.assert_close(torch.from_numpy(found)[sampled], expected[sampled[1:]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "qwen3 tied", "qwen3 moe"])
def test_an_export_is_the_trained_model_bit_for_bit_under_the_names_of_save_pretrained(tmp_path: Path, family: str):
    model_dir = write_model(tmp_path / "model", family)
    engine = trained_engine(model_dir)
    run_dir = run_with_checkpoint(tmp_path, engine)
    out = export_checkpoint(run_dir, run_dir.export)
    exported, trained = in_transformers(out), masters(engine)
    found = dict(exported.named_parameters())
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], trained[name]) for name in trained)
    assert not torch.equal(found["model.norm.weight"], in_transformers(model_dir).model.norm.weight), "it has trained"
    exported.save_pretrained(tmp_path / "again")
    written, again = load_file(out / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == again.keys() == load_file(Path(model_dir) / "model.safetensors").keys()
    assert all(torch.equal(written[name], again[name]) for name in again)
    assert ("lm_head.weight" in written) is (family != "qwen3 tied")
    assert_scores_are_those_of(engine, exported)


@pytest.mark.parametrize("family", ["qwen3 tied", "qwen3 moe"])
def test_an_export_of_adapters_is_the_base_with_alpha_over_rank_times_b_a_added(tmp_path: Path, family: str):
    model_dir = write_model(tmp_path / "model", family)
    engine = trained_engine(model_dir, **LORA)
    run_dir = run_with_checkpoint(tmp_path, engine)
    out = export_checkpoint(run_dir, run_dir.export)
    exported, base, trained = in_transformers(out), dict(in_transformers(model_dir).named_parameters()), masters(engine)
    adapted = {name for name in base if f"{name.removesuffix('weight')}lora_A.default.weight" in trained}
    assert "model.layers.1.self_attn.o_proj.weight" in adapted
    assert "lm_head.weight" not in adapted
    for name, found in exported.named_parameters():
        if name not in adapted:
            assert torch.equal(found, base[name]), name
            continue
        a, b = (trained[f"{name.removesuffix('weight')}lora_{part}.default.weight"] for part in "AB")
        change = found.detach() - base[name].detach()
        torch.testing.assert_close(change, 3.0 * b @ a, rtol=1e-5, atol=1e-7)
        assert float(change.abs().max()) > 1e-4, name
    assert load_file(out / "model.safetensors").keys() == load_file(Path(model_dir) / "model.safetensors").keys()
    assert_scores_are_those_of(engine, exported)


def test_what_a_router_keeps_beside_its_weights_is_exported_as_it_was(tmp_path: Path):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )
    one_rank()
    model, correction = DeepseekV3ForCausalLM(config), torch.tensor([0.5, -0.25, 0.0, 1.0])
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(correction)
    model.save_pretrained(tmp_path / "model")
    engine = FSDP2Engine(spec(str(tmp_path / "model"), dtype="bfloat16"))
    engine.initialize()
    run_dir = run_with_checkpoint(tmp_path, engine)
    written = load_file(export_checkpoint(run_dir, run_dir.export) / "model.safetensors")
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(written["model.layers.1.mlp.gate.e_score_correction_bias"], correction)
    assert written.keys() == before.keys()
    assert all(torch.equal(written[name], before[name].to(written[name].dtype)) for name in before)


def test_an_export_of_many_files_is_that_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model_dir = tiny_model_dir(tmp_path / "model")
    (Path(model_dir) / "tokenizer_config.json").write_text("{}")
    run_dir = run_with_checkpoint(tmp_path, trained_engine(model_dir))
    whole = load_file(export_checkpoint(run_dir, run_dir.export) / "model.safetensors")
    monkeypatch.setattr("asyncrl.learner.export.SHARD_BYTES", 30_000)
    out = export_checkpoint(run_dir, run_dir.export)
    assert (out / "tokenizer_config.json").read_text() == "{}"
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert not (out / "model.safetensors").exists()
    assert all(torch.equal(whole[name], tensor) for name, tensor in in_transformers(out).state_dict().items())


def test_a_bfloat16_run_exports_what_its_generators_sample_from(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    engine = trained_engine(tiny_model_dir(tmp_path / "model"), "bfloat16", **LORA)
    run_dir = run_with_checkpoint(tmp_path, engine)
    exported = dict(AutoModelForCausalLM.from_pretrained(export_checkpoint(run_dir, tmp_path / "out")).named_parameters())
    for name, tensor in engine.named_tensors():
        assert exported[name].dtype == torch.bfloat16
        assert torch.equal(exported[name], tensor)


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path):
    engine = trained_engine(tiny_model_dir(tmp_path / "model"), **LORA)
    run_dir = run_with_checkpoint(tmp_path, engine)
    run_dir.write_config(Config())
    with pytest.raises(DataError, match=r"lacks .* model.lm_head.weight first: use the model and the learner.lora_rank"):
        export_checkpoint(run_dir, run_dir.export)
    assert not run_dir.export.exists()


def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path: Path):
    with pytest.raises(DataError, match="no whole checkpoint"):
        export_checkpoint(RunDir(tmp_path), tmp_path / "out")


def test_a_folder_of_other_files_is_not_overwritten(tmp_path: Path):
    run_dir = run_with_checkpoint(tmp_path, trained_engine(tiny_model_dir(tmp_path / "model")))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(DataError, match="holds other files"):
        export_checkpoint(run_dir, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"
