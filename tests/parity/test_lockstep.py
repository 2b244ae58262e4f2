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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs side by side, so that the load that each makes for the others changes when things happen, and nothing else."""
    folder = tmp_path_factory.mktemp("lockstep")
    synchronous = {"synchronous": ("queue.max_staleness=0", "launch.steps=5")}
    options = synchronous | dict.fromkeys(("one", "two"), ("queue.max_staleness=2", "launch.steps=6"))
    drivers = {name: start_run(folder / name, *SMALL, *chosen) for name, chosen in options.items()}
    for name, driver in drivers.items():
        assert driver.wait(500) == 0, console(folder / name)
    return folder


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "export" / "model.safetensors")


def assert_equal_bit_for_bit(left, right):
    assert left.keys() == right.keys() and len(left) > 10
    for name in left:
        assert torch.equal(left[name], right[name]), (name, (left[name] - right[name]).abs().max().item())


def test_lockstep_at_staleness_0_is_the_synchronous_run_bit_for_bit(runs, tmp_path):
    run_dir, out = runs / "synchronous", tmp_path / "plain.safetensors"
    script = Path(__file__).parent.parent / "support" / "plain_loop.py"
    done = subprocess.run([sys.executable, str(script), str(run_dir), str(out)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = weights_of(run_dir)
    assert_equal_bit_for_bit(found, load_file(out))
    start = load_file(next(Path(json.loads((run_dir / "run.json").read_text())["model_dir"]).glob("*.safetensors")))
    assert any(not torch.equal(found[name], start[name]) for name in found), "nothing was trained"
    assert [m["staleness_hist"] for m in metrics(run_dir)] == [{"0": m["trained_tokens"]} for m in metrics(run_dir)]


def test_lockstep_at_staleness_2_repeats_itself_and_every_token_is_2_versions_old(runs):
    assert_equal_bit_for_bit(weights_of(runs / "one"), weights_of(runs / "two"))
    for name in ("one", "two"):
        lags = [m["staleness_hist"] for m in metrics(runs / name)]
        trained = [m["trained_tokens"] for m in metrics(runs / name)]
        assert lags == [{str(min(step, 2)): tokens} for step, tokens in enumerate(trained)]
