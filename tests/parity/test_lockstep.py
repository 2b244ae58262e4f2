"""Lockstep, whole processes: at staleness 0 it is the synchronous run, at 2 it repeats itself, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_process import console, metrics, start_run
from safetensors.torch import load_file

pytestmark = pytest.mark.real

SMALL = (
    "recipe=tiny", "queue=lockstep", "algorithm.groups_per_step=4", "algorithm.group_size=4", "algorithm.entropy_bonus=0",
    "learner.warmup_steps=2", "launch.target_reward=0", "launch.checkpoint_every=0", "monitor.live=plain", "monitor.tensorboard=false",
)  # fmt: skip


def weights_after(*run_dirs: Path, overrides: tuple[str, ...]) -> list[dict[str, torch.Tensor]]:
    """Final weights of runs that are started side by side."""
    drivers = [start_run(run_dir, *SMALL, *overrides) for run_dir in run_dirs]
    for run_dir, driver in zip(run_dirs, drivers, strict=True):
        assert driver.wait(400) == 0, console(run_dir)
    return [load_file(run_dir / "export" / "model.safetensors") for run_dir in run_dirs]


def assert_equal_bit_for_bit(left, right):
    assert left.keys() == right.keys() and len(left) > 10
    for name in left:
        assert torch.equal(left[name], right[name]), (name, (left[name] - right[name]).abs().max().item())


def test_lockstep_at_staleness_0_is_the_synchronous_run_bit_for_bit(tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "plain.safetensors"
    (found,) = weights_after(run_dir, overrides=("queue.max_staleness=0", "launch.steps=5"))
    script = Path(__file__).parent.parent / "support" / "plain_loop.py"
    done = subprocess.run([sys.executable, str(script), str(run_dir), str(out)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_equal_bit_for_bit(found, load_file(out))
    start = load_file(next(Path(json.loads((run_dir / "run.json").read_text())["model_dir"]).glob("*.safetensors")))
    assert any(not torch.equal(found[name], start[name]) for name in found), "nothing was trained"
    assert [m["staleness_hist"] for m in metrics(run_dir)] == [{"0": m["trained_tokens"]} for m in metrics(run_dir)]


def test_lockstep_at_staleness_2_repeats_itself_and_every_token_is_2_versions_old(tmp_path):
    # side by side, so that the load that one makes for the other changes when things happen, and nothing else
    runs = weights_after(tmp_path / "one", tmp_path / "two", overrides=("queue.max_staleness=2", "launch.steps=6"))
    assert_equal_bit_for_bit(*runs)
    for name in ("one", "two"):
        lags = [m["staleness_hist"] for m in metrics(tmp_path / name)]
        trained = [m["trained_tokens"] for m in metrics(tmp_path / name)]
        assert lags == [{str(min(step, 2)): tokens} for step, tokens in enumerate(trained)]
