"""Generators need their engine and the light part of the package: no ray, no hydra, no learner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import generator_environment
import pytest

import asyncrl

ROOT = Path(asyncrl.__file__).parent.parent
BLOCKED = (
    "ray",
    "hydra",
    "omegaconf",
    "accelerate",
    "tensorboard",
    "asyncrl.learner",
    "asyncrl.launch",
    "asyncrl.algorithms",
    "asyncrl.monitor",
)
IMPORT_HOOK = f"""
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in {BLOCKED!r}):
            raise ImportError(f"{{name}} is not part of a generator's environment")

sys.meta_path.insert(0, Blocked())
"""


def run(code, python=sys.executable):
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    )


@pytest.mark.parametrize(
    "module", ["__main__", "process", "rollout", "evaluate", "vllm_engine", "vllm_api", "vllm_exact", "vllm_cut", "vllm_start"]
)
def test_every_module_of_a_generator_imports_where_ray_hydra_and_the_learner_are_blocked(module):
    done = run(IMPORT_HOOK + f"import asyncrl.generators.{module}")
    assert done.returncode == 0, done.stderr


def test_the_block_is_real():
    done = run(IMPORT_HOOK + "import asyncrl.learner")
    assert "asyncrl.learner is not part of a generator's environment" in done.stderr


def test_a_generator_asks_for_its_run_in_an_environment_without_the_packages_of_the_others(tmp_path):
    python = generator_environment.build(tmp_path / "venv")
    for package in ("ray", "hydra", "omegaconf", "accelerate", "tensorboard"):
        assert f"No module named '{package}'" in run(f"import {package}", python).stderr
    done = subprocess.run(
        [python, "-m", "asyncrl.generators", str(tmp_path / "nothing"), "--name", "generator-0"],
        capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("is not a run directory: config.json is missing")
