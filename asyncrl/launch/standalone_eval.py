"""``asyncrl eval``: one model, one held-out set, outside any run."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.run_dir import write_atomic
from asyncrl.errors import EngineError
from asyncrl.launch.launcher import Launcher
from asyncrl.launch.models import prepare_model
from asyncrl.launch.preflight import check_config, check_model
from asyncrl.launch.start import model_cache

__all__ = ["evaluate_model"]

DEFAULT_PROMPTS = 400
LIMIT_S = 3600.0
GRACE_S = 5.0


def evaluate_model(model: str, config: Config) -> dict[str, float]:
    """Greedy scores of a model on the task's held-out prompts (``task.eval_size``, 400 when 0).

    Returns:
        accuracy (share of prompts with the full reward), mean_reward, n.

    Raises:
        ConfigError: a setting that cannot work. EngineError: the sampling process failed, with its last line.
    """
    size = config.task.eval_size or DEFAULT_PROMPTS
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": model}),
            "task": config.task.model_copy(update={"eval_size": size}),
        }
    )
    check_config(config)
    folder = prepare_model(config.model, model_cache())
    check_model(config, folder)
    with tempfile.TemporaryDirectory() as scratch:
        result = _run(config, folder, Path(scratch))
    return {name: float(result[name]) for name in ("accuracy", "mean_reward", "n")}


def _run(config: Config, folder: Path, scratch: Path) -> dict[str, float]:
    options, out = scratch / "config.json", scratch / "result.json"
    write_atomic(options, config.model_dump_json())
    command = [config.generator.python or sys.executable, "-m", "asyncrl.generators.evaluate"]
    command += ["--model", str(folder), "--run-config", str(options), "--out", str(out)]
    environment = {"OMP_NUM_THREADS": str(config.generator.threads), "HF_HUB_OFFLINE": "1"}
    launcher, end = Launcher(), time.monotonic() + LIMIT_S
    launcher.start(command, environment, str(scratch / "log"), GRACE_S)
    try:
        while (state := launcher.state()).exit_code is None:
            if time.monotonic() > end:
                raise EngineError(f"evaluation was not done after {LIMIT_S:g} s")
            time.sleep(0.2)
    finally:
        launcher.kill()
    if state.exit_code != 0:
        raise EngineError(f"evaluation failed: {state.last_line}")
    result: dict[str, float] = json.loads(out.read_text())
    return result
