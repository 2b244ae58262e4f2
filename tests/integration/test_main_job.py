"""The main job as a user runs it: real Ray, vLLM, ZeroMQ, FSDP2."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_process import belonging_to, commands, console, everything_of, metrics, start_run, summary, wait_until

from asyncrl.monitor.writer import REQUIRED_FIELDS

pytestmark = pytest.mark.real

QUIET = ("monitor.live=plain", "monitor.tensorboard=false")


def tail_mean(steps, count=10):
    return sum(m["reward_mean"] for m in steps[-count:]) / count


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """``asyncrl train recipe=tiny`` to its end, once for this file."""
    run_dir = tmp_path_factory.mktemp("tiny") / "run"
    started = time.monotonic()
    driver = start_run(run_dir, "recipe=tiny", "monitor.live=plain")
    code = driver.wait(600)
    return run_dir, code, time.monotonic() - started


def test_tiny_learns_from_under_a_tenth_to_over_95_percent(tiny):
    run_dir, code, _ = tiny
    assert code == 0, console(run_dir)
    steps = metrics(run_dir)
    assert sum(m["reward_mean"] for m in steps[:5]) / 5 < 0.1
    assert tail_mean(steps) > 0.95


def test_each_step_has_the_promised_metrics_and_the_bound_holds(tiny):
    steps = metrics(tiny[0])
    assert [m["step"] for m in steps] == list(range(1, len(steps) + 1))
    for m in steps:
        assert set(REQUIRED_FIELDS) <= set(m)
        assert sum(m["staleness_hist"].values()) == m["trained_tokens"] > 0
        assert 0 <= m["staleness_mean"] <= m["staleness_max"] <= 1
        assert m["mismatch_kl"] >= -1e-9 and 0 < m["ess"] <= 1.001 and m["abs_log_ratio"] < 0.25
        assert m["staleness_max"] == 1 or m["mismatch_kl"] < 1e-6, "at lag 0 sampler and learner hold the same weights in float32"
    # a batch may hold one rare token that the update in between made a hundred times likelier, and both have its weight in them; few do
    near = [m for m in steps if abs(m["mismatch_kl"]) < 0.05 and m["ess"] > 0.5]
    assert len(near) >= 0.97 * len(steps)
    assert statistics.median(m["mismatch_kl"] for m in steps) < 0.01 and statistics.median(m["ess"] for m in steps) > 0.95
    assert {m["staleness_max"] for m in steps} == {0, 1}


def test_the_summary_accounts_for_every_group(tiny):
    found = summary(tiny[0])
    assert found["status"] == "finished"
    assert found["admitted"] == found["trained"] + sum(found["dropped"].values()) + found["in_flight"]
    assert found["trained"] == 32 * found["steps"]
    assert found["reward_start"] < 0.1 < 0.9 < found["reward_end"]
    assert found["versions"]["torch"] and found["engine"] == {"generator": "vllm", "learner": "fsdp2"}


def test_the_run_directory_has_everything_and_no_process_is_left(tiny):
    run_dir = tiny[0]
    assert {p.name for p in (run_dir / "logs").iterdir()} >= {"queue.log", "learner-0.log", "generator-0.log"}
    assert list((run_dir / "tensorboard").glob("events.*"))
    manifests = sorted((run_dir / "checkpoints").glob("step-*/manifest.json"))
    assert 1 <= len(manifests) <= 2
    assert (run_dir / "config.json").exists()
    assert belonging_to(run_dir) == {}


def test_export_and_eval_of_the_trained_run(tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = tiny[0]
    done = subprocess.run([sys.executable, "-m", "asyncrl", "export", str(run_dir), str(tmp_path / "hf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("3141>", return_tensors="pt").input_ids
    answer = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :])
    assert sum(a == b for a, b in zip(answer, "3141", strict=False)) >= 3, answer
    scored = subprocess.run(
        [sys.executable, "-m", "asyncrl", "eval", str(tmp_path / "hf"), "task=copy", "task.eval_size=64", "generator.max_new_tokens=4"],
        capture_output=True,
        text=True,
    )
    assert scored.returncode == 0, scored.stderr
    words = scored.stdout.split()
    assert words[words.index("prompts") + 1] == "64" and float(words[words.index("mean_reward") + 1]) > 0.9


def test_a_control_with_permuted_answers_learns_nothing_in_as_many_steps(tiny, tmp_path):
    run_dir, steps = tmp_path / "run", len(metrics(tiny[0]))
    driver = start_run(run_dir, "recipe=tiny", "task.permute_answers=true", f"launch.steps={steps}", "launch.export=false", *QUIET)
    assert driver.wait(600) == 0, console(run_dir)
    assert len(metrics(run_dir)) == steps
    assert max(tail_mean(metrics(run_dir)[: i + 10]) for i in range(steps - 9)) < 0.6


def assert_stops_in_order(run_dir, driver, number):
    """Within 15 seconds, with a checkpoint of the last step, nothing left; returns that step."""
    pids = everything_of(run_dir) - {driver.pid}
    assert len(pids) >= 8
    asked = time.monotonic()
    os.kill(driver.pid, number)
    assert driver.wait(30) == 128 + number, console(run_dir)
    assert time.monotonic() - asked < 15.0
    assert not pids & set(commands()), [commands().get(pid) for pid in pids]
    reached = metrics(run_dir)[-1]["step"]
    manifest = json.loads((run_dir / "checkpoints" / f"step-{reached:06d}" / "manifest.json").read_text())
    assert manifest["step"] == reached == manifest["frontier"]["steps"]
    assert summary(run_dir)["status"] == "stopped"
    return reached


def test_ctrl_c_and_sigterm_stop_in_order_within_15_seconds_and_the_run_resumes(tmp_path):
    run_dir = tmp_path / "run"
    driver = start_run(run_dir, "recipe=tiny", "launch.steps=1000", "launch.target_reward=0", "launch.checkpoint_every=0", *QUIET)
    wait_until(lambda: len(metrics(run_dir)) >= 4 or driver.poll() is not None, 200, "four steps")
    reached = assert_stops_in_order(run_dir, driver, signal.SIGINT)
    again = start_run(run_dir, command="resume")
    wait_until(lambda: len(metrics(run_dir)) >= reached + 3 or again.poll() is not None, 200, "three steps more")
    last = assert_stops_in_order(run_dir, again, signal.SIGTERM)
    assert [m["step"] for m in metrics(run_dir)] == list(range(1, last + 1))
    assert summary(run_dir)["incarnation"] == 1 and summary(run_dir)["trained"] == 32 * last


def test_hostile_rows_are_refused_or_handled_and_the_run_goes_on(tmp_path):
    hostile = Path(__file__).parent.parent / "data" / "hostile.jsonl"
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(hostile.read_bytes() + b"".join(b'{"prompt": "%d>", "label": "%d"}\n' % (n, n) for n in range(1000, 1016)))
    run_dir = tmp_path / "run"
    driver = start_run(
        run_dir, "recipe=tiny", "task.name=jsonl", f"task.path={rows}", "task.reward=positions", "algorithm.groups_per_step=8",
        "launch.steps=4", "launch.target_reward=0", "launch.export=false", *QUIET,
    )  # fmt: skip
    assert driver.wait(200) == 0, console(run_dir)
    assert len(metrics(run_dir)) == 4
    refused = [json.loads(line) for line in (run_dir / "bad_rows.jsonl").read_text().splitlines()]
    assert len(refused) > 10 and all(row["reason"] and row["row"] >= 1 for row in refused)
    found = summary(run_dir)
    assert found["admitted"] == found["trained"] + sum(found["dropped"].values()) + found["in_flight"]


def test_what_is_wrong_is_said_before_anything_starts():
    before = set(commands())
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "train", "recipe=tiny", "queue.max_staleness=0", "sync.every=3"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "3 - 1" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not [text for pid, text in commands().items() if pid not in before and "asyncrl" in text]
