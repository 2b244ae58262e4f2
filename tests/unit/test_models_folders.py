"""A model folder is checked before anything starts; what it lacks is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError, EngineError
from asyncrl.launch import models
from asyncrl.launch.models import check_model_dir, prepare_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def sharded(folder: Path, *present: str) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in present:
        (folder / name).write_bytes(b"")


def test_a_whole_folder_is_used_where_it_lies(folder: Path, tmp_path: Path) -> None:
    assert prepare_model(ModelConfig(path=str(folder)), tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_all_shards_of_an_index_are_enough(folder: Path) -> None:
    sharded(folder, "model-1.safetensors", "model-2.safetensors")
    assert check_model_dir(folder) == folder


def test_a_missing_shard_is_named(folder: Path) -> None:
    sharded(folder, "model-1.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 weight files: model-2\.safetensors"):
        check_model_dir(folder)


@pytest.mark.parametrize(
    ("removed", "message"),
    [("config.json", "has no config.json"), ("tokenizer.json", "has no tokenizer"), ("model.safetensors", "has no weights")],
)
def test_a_missing_part_is_named(folder: Path, removed: str, message: str) -> None:
    (folder / removed).unlink()
    with pytest.raises(ConfigError, match=message):
        check_model_dir(folder)


def test_weights_in_a_pickle_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"it has pytorch_model\.bin: save it as safetensors"):
        check_model_dir(folder)


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "names no model_type"), ("{}", "names no model_type")])
def test_a_config_that_cannot_be_read_is_refused(folder: Path, content: str, message: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        check_model_dir(folder)


def test_an_index_that_is_none_is_refused(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ConfigError, match="is not an index of safetensors"):
        check_model_dir(folder)


def test_a_hub_name_is_told_apart_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is no folder"):
        prepare_model(ModelConfig(path="Qwen/Qwen3-0.6B"), tmp_path)


def test_an_unknown_builtin_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="builtin:tiny-qwen3, builtin:smollm2-135m-instruct; met 'builtin:tiny'"):
        prepare_model(ModelConfig(path="builtin:tiny"), tmp_path)


def test_a_model_that_cannot_be_made_shows_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(models.__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}")
    cache = tmp_path / "cache"
    with pytest.raises(EngineError, match=r"exit code 1: .*this torch is broken"):
        prepare_model(ModelConfig(), cache)
    assert list(cache.iterdir()) == []


def test_a_build_past_its_deadline_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(models.__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(models, "BUILD_TIMEOUT_S", 2.0)
    with pytest.raises(EngineError, match="took more than 2 s and was ended"):
        prepare_model(ModelConfig(), tmp_path / "cache")


def test_each_dtype_tie_and_seed_has_a_folder_of_its_own() -> None:
    configs = [
        ModelConfig(),
        ModelConfig(dtype="bfloat16"),
        ModelConfig(tied=True),
        ModelConfig(seed=1),
        ModelConfig(path="builtin:smollm2-135m-instruct"),
    ]
    assert len({models._cache_name(config) for config in configs}) == 5
