"""From the option ``model.path`` to a Hugging Face folder that generator and learner both load.

A built-in model is made once, in a process of its own because that loads torch, and kept in a cache: it appears there
whole, by a rename, or not at all. Waits at most ``BUILD_TIMEOUT_S`` for that process.

``python -m asyncrl.launch.models NAME --out DIR`` makes one by hand.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError, EngineError

__all__ = ["BUILD_TIMEOUT_S", "BUILTINS", "check_model_dir", "prepare_model"]

BUILTINS = ("builtin:tiny-qwen3", "builtin:smollm2-135m-instruct")
BUILD_TIMEOUT_S = 900.0
_FORMAT = 1  # part of the cache key: raise it when the folder of an unchanged name changes
_LOG_TAIL_LINES = 5
_log = logging.getLogger(__name__)


def prepare_model(config: ModelConfig, cache: Path) -> Path:
    """The folder of a model; a built-in one is made first if the cache lacks it.

    Args:
        cache: folder that built-in models are kept in; created if need be.

    Raises:
        ConfigError: unknown built-in name, or a folder that lacks something, which is named.
        EngineError: making a built-in model failed, with the last lines of its output.
    """
    if not config.path.startswith("builtin:"):
        return check_model_dir(Path(config.path).expanduser().absolute())
    if config.path not in BUILTINS:
        raise ConfigError(f"model.path is a folder or one of {', '.join(BUILTINS)}; met {config.path!r}")
    target = cache.absolute() / _cache_name(config)
    if target.is_dir():
        return check_model_dir(target)
    cache.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    _log.info("making %s in %s", config.path, target)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=cache) as scratch:
        made = Path(scratch) / "model"
        _build_in_subprocess(config, made)
        check_model_dir(made)
        _move_into_place(made, target)
    _log.info("made %s in %.1f s", config.path, time.monotonic() - started_s)
    return target


def check_model_dir(folder: Path) -> Path:
    """The folder, if it has a readable config, a tokenizer and all its safetensors.

    Raises:
        ConfigError: names what is missing.
    """
    if not folder.is_dir():
        raise ConfigError(f"model.path is an existing folder or one of {', '.join(BUILTINS)}; met {str(folder)!r}, which is no folder")
    _check_config(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"model.path {folder} has no tokenizer: tokenizer.json, tokenizer.model or vocab.json")
    _check_weights(folder)
    return folder


def _check_config(folder: Path) -> None:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path {folder} has no config.json: is it a Hugging Face model folder?")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ConfigError(f"{file} names no model_type")


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return
    if not index.is_file():
        other = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"; it has {', '.join(other)}: save it as safetensors" if other else ""
        raise ConfigError(f"model.path {folder} has no weights: neither model.safetensors nor {index.name}{found}")
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors: {error!r}") from error
    missing = sorted(name for name in shards if not (folder / name).is_file())
    if missing:
        raise ConfigError(f"model.path {folder} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:4])}")


def _cache_name(config: ModelConfig) -> str:
    name = f"{config.path.removeprefix('builtin:')}-{config.dtype}"
    if config.path == "builtin:tiny-qwen3":
        name += f"-{'tied' if config.tied else 'untied'}-seed{config.seed}"
    return f"{name}-v{_FORMAT}"


def _build_in_subprocess(config: ModelConfig, out: Path) -> None:
    command = [sys.executable, "-m", "asyncrl.launch.models", config.path, "--out", str(out), "--dtype", config.dtype]
    command += ["--seed", str(config.seed), *(["--tied"] if config.tied else [])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"making {config.path} took more than {BUILD_TIMEOUT_S:.0f} s and was ended") from error
    if done.returncode != 0:
        tail = " | ".join(done.stderr.strip().splitlines()[-_LOG_TAIL_LINES:])
        raise EngineError(f"making {config.path} failed with exit code {done.returncode}: {tail}")


def _move_into_place(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():  # else another run made the same folder in the meantime
            raise


def main(arguments: list[str] | None = None) -> int:
    """Makes a built-in model; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.launch.models", description="Makes the folder of a built-in model.")
    parser.add_argument("name", choices=BUILTINS)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=ModelConfig().dtype)
    parser.add_argument("--tied", action="store_true", help="tie embedding and output head (tiny-qwen3)")
    parser.add_argument("--seed", type=int, default=ModelConfig().seed, help="of the random weights (tiny-qwen3)")
    options = parser.parse_args(arguments)
    if options.out.exists():
        parser.error(f"{options.out} exists")
    from asyncrl.launch import model_builders

    try:
        if options.name == "builtin:tiny-qwen3":
            model_builders.build_tiny(options.out, dtype=options.dtype, tied=options.tied, seed=options.seed)
        else:
            model_builders.build_smollm2(options.out, dtype=options.dtype)
    except BaseException:
        shutil.rmtree(options.out, ignore_errors=True)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
