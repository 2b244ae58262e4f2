"""``asyncrl eval``: one model, one held-out set, outside any run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.run_dir import write_atomic
from asyncrl.errors import EngineError
from asyncrl.launch.models import prepare_model
from asyncrl.launch.preflight import check_model
from asyncrl.launch.start import model_cache

__all__ = ["evaluate_model"]

DEFAULT_PROMPTS = 400


def evaluate_model(model: str, config: Config) -> dict[str, float]:
    """Greedy scores of a model on the task's held-out prompts (``task.eval_size``, 400 when 0).

    Returns:
        accuracy (share of prompts with the full reward), mean_reward, n.

    Raises:
        EngineError: the sampling process failed, with the end of its output.
    """
    size = config.task.eval_size or DEFAULT_PROMPTS
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": model}),
            "task": config.task.model_copy(update={"eval_size": size}),
        }
    )
    folder = prepare_model(config.model, model_cache())
    check_model(config, folder)
    with tempfile.TemporaryDirectory() as scratch:
        options, out = Path(scratch) / "config.json", Path(scratch) / "result.json"
        write_atomic(options, config.model_dump_json())
        arguments = ["--model", str(folder), "--run-config", str(options), "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(config.generator.threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [config.generator.python or sys.executable, "-m", "asyncrl.generators.evaluate", *arguments],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise EngineError(f"evaluation failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        result = json.loads(out.read_text())
    return {name: float(result[name]) for name in ("accuracy", "mean_reward", "n")}
