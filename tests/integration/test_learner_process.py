"""The learner as real processes with a real queue; a thread of the test samples random tokens in the generators' place."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_support import VOCABULARY, tiny_model_dir

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import AsyncRLError, DataError
from asyncrl.launch.start import free_port
from asyncrl.learner.checkpoint import read_manifest
from asyncrl.learner.export import export_checkpoint
from asyncrl.queue.client import Observer, Producer
from asyncrl.queue.messages import Ticket
from asyncrl.queue.shm import SegmentKeeper
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan

pytestmark = pytest.mark.real

START_S = 120.0
OPTIONS: dict[str, Any] = {
    "algorithm": {"group_size": 2, "groups_per_step": 2},
    "queue": {"max_staleness": 2, "dead_after_s": 4.0},
    "learner": {"micro_batch_tokens": 64, "warmup_steps": 0, "learning_rate": 1e-3},
    "launch": {"steps": 4, "checkpoint_every": 2},
    "monitor": {"tensorboard": False},
}


def new_run(tmp_path: Path, *, ranks: int = 1, learner: dict[str, Any] | None = None, **launch: Any) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.logs.mkdir(parents=True)
    options = OPTIONS | {"launch": OPTIONS["launch"] | launch, "learner": OPTIONS["learner"] | {"ranks": ranks} | (learner or {})}
    run_dir.write_config(Config.model_validate(options))
    write_facts(run_dir, tiny_model_dir(tmp_path / "model", tied=True), incarnation=0)
    return run_dir


def write_facts(run_dir: RunDir, model_dir: str, *, incarnation: int, checkpoint: str = "") -> None:
    facts = RunFacts(
        run_id=f"l{zlib.crc32(str(run_dir.path).encode()):08x}",
        incarnation=incarnation,
        queue_endpoints=(f"ipc://{run_dir.path}/q{incarnation}",),
        sync_endpoint=f"ipc://{run_dir.path}/s{incarnation}",
        rendezvous=f"tcp://127.0.0.1:{free_port()}",
        model_dir=model_dir,
        generator_device="cpu",
        learner_device="cpu",
        checkpoint=checkpoint,
    )
    run_dir.write_facts(facts)


def start(run_dir: RunDir, module: str, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    log = (run_dir.logs / f"{name}.log").open("ab")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", f"asyncrl.{module}", str(run_dir.path), *arguments]
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


@contextmanager
def running(run_dir: RunDir, ranks: int = 1) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Queue, learner ranks and the sampling thread; whatever is left is killed at the end."""
    processes = {"queue": start(run_dir, "queue", "queue")}
    for rank in range(ranks):
        processes[f"learner-{rank}"] = start(run_dir, "learner", f"learner-{rank}", "--rank", str(rank))
    ended = threading.Event()
    sampler = threading.Thread(target=lambda: asyncio.run(sample(run_dir, ended)))
    sampler.start()
    try:
        yield processes
    finally:
        ended.set()
        sampler.join(30)
        for process in processes.values():
            process.kill()
            process.wait(10)
        SegmentKeeper(run_dir.read_facts().run_id).sweep(())


async def sample(run_dir: RunDir, ended: threading.Event) -> None:
    """Random answers to every ticket, under the newest version that the queue knows; ends with the queue."""
    config, facts = run_dir.read_config(), run_dir.read_facts()
    rng = np.random.default_rng(facts.incarnation)
    producer = await Producer.connect(config, facts, "generator-0")
    observer = Observer.connect(config, facts, "watcher")
    try:
        while not ended.is_set():
            version = observer.status().step
            await producer.heartbeat(version, {}, 0)
            found = await producer.tickets(version, 4, 0.2)
            if found.tickets:
                await producer.put([group_for(ticket, version, facts.incarnation, rng) for ticket in found.tickets])
    except AsyncRLError:  # the queue was taken down with the rest
        return
    finally:
        observer.close()
        await producer.close()


def group_for(ticket: Ticket, version: int, incarnation: int, rng: np.random.Generator) -> TrajectoryGroup:
    siblings = []
    for sibling in range(2):
        response = rng.integers(1, VOCABULARY, 4).tolist()
        siblings.append(
            Trajectory.checked(
                group_id=ticket.group_id,
                ticket=ticket.ticket,
                attempt=ticket.attempt,
                sibling=sibling,
                sample=0,
                prompt_id=ticket.prompt_id,
                seed=ticket.seed,
                incarnation=incarnation,
                input_ids=[1, 2, 3, *response],
                loss_mask=[False] * 3 + [True] * 4,
                behavior_logprobs=[0.0] * 3 + [-4.0] * 4,
                version_spans=[VersionSpan(3, version)],
                reward=float(sibling),
                finish_reason="stop",
                temperature=1.0,
                generator="generator-0",
                engine="fake",
                dispatched_s=0.0,
                finished_s=1.0,
            )
        )
    return TrajectoryGroup(trajectories=tuple(siblings))


def metrics_of(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.metrics.read_text().splitlines()] if run_dir.metrics.exists() else []


def wait_for_step(run_dir: RunDir, step: int, *watched: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_S
    while not any(line["step"] >= step for line in metrics_of(run_dir)):
        assert time.monotonic() < deadline_s, log_of(run_dir)
        assert all(process.poll() is None for process in watched), log_of(run_dir)
        time.sleep(0.05)


def log_of(run_dir: RunDir, name: str = "learner-0") -> str:
    return (run_dir.logs / f"{name}.log").read_text()


def test_a_run_trains_reports_checkpoints_exports_and_resumes_from_its_frontier(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    run_dir = new_run(tmp_path)
    with running(run_dir) as processes:
        assert processes["learner-0"].wait(START_S) == 0, log_of(run_dir)
    lines = metrics_of(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["trained_tokens"] == 16 and line["trained_groups"] == 2 for line in lines)
    assert all(sum(line["staleness_hist"].values()) == 16 and line["staleness_max"] <= 2 for line in lines)
    assert all(line["reward_mean"] == 0.5 and line["grad_norm"] > 0 for line in lines)
    assert sorted(p.name for p in run_dir.checkpoints.iterdir()) == ["step-000002", "step-000004"]
    latest = run_dir.latest_checkpoint()
    assert latest is not None
    frontier = read_manifest(latest).frontier
    assert (frontier.steps, frontier.trained) == (4, 8)
    AutoModelForCausalLM.from_pretrained(run_dir.export)

    write_facts(run_dir, run_dir.read_facts().model_dir, incarnation=1, checkpoint=str(latest))
    config = run_dir.read_config()
    run_dir.write_config(config.model_copy(update={"launch": config.launch.model_copy(update={"steps": 5})}))
    with running(run_dir) as processes:
        assert processes["learner-0"].wait(START_S) == 0, log_of(run_dir)
    assert [line["step"] for line in metrics_of(run_dir)] == [1, 2, 3, 4, 5]
    resumed = run_dir.latest_checkpoint()
    assert resumed is not None
    manifest = read_manifest(resumed)
    assert (manifest.step, manifest.incarnation, manifest.frontier.trained) == (5, 1, 10)


def test_two_ranks_train_together_and_end_on_sigterm_with_a_checkpoint(tmp_path: Path):
    run_dir = new_run(tmp_path, ranks=2, steps=10_000, checkpoint_every=0)
    with running(run_dir, ranks=2) as processes:
        ranks = [processes["learner-0"], processes["learner-1"]]
        wait_for_step(run_dir, 2, *ranks)
        started_s = time.monotonic()
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        assert [rank.wait(10) for rank in ranks] == [0, 0], log_of(run_dir)
        assert time.monotonic() - started_s < 10
    latest = run_dir.latest_checkpoint()
    assert latest is not None
    assert read_manifest(latest).step == metrics_of(run_dir)[-1]["step"]
    assert read_manifest(latest).world_size == 2
    assert not run_dir.export.exists(), "a stop has no time for it"
    export_checkpoint(run_dir, run_dir.export)
    assert (run_dir.export / "model.safetensors").is_file()
    (run_dir.export / "config.json").touch()
    with pytest.raises(DataError, match="holds other files"):
        export_checkpoint(run_dir, run_dir.path)
    assert run_dir.config_file.exists()


def test_a_pipeline_trains_led_by_its_last_stage_and_goes_on_under_tensor_parallelism(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    run_dir = new_run(tmp_path, ranks=2, learner={"engine": "megatron", "pipeline_parallel": 2}, steps=3, checkpoint_every=2)
    with running(run_dir, ranks=2) as processes:
        assert [processes[f"learner-{rank}"].wait(START_S) for rank in (0, 1)] == [0, 0], log_of(run_dir) + log_of(run_dir, "learner-1")
    lines = metrics_of(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["trained_tokens"] == 16 and line["reward_mean"] == 0.5 and line["grad_norm"] > 0 for line in lines)
    assert "published version 2" in log_of(run_dir, "learner-1") and "published" not in log_of(run_dir)
    latest = run_dir.latest_checkpoint()
    assert latest is not None and read_manifest(latest).frontier.trained == 6
    AutoModelForCausalLM.from_pretrained(run_dir.export)

    write_facts(run_dir, run_dir.read_facts().model_dir, incarnation=1, checkpoint=str(latest))
    config = run_dir.read_config()
    learner = config.learner.model_copy(update={"pipeline_parallel": 1, "tensor_parallel": 2})
    run_dir.write_config(config.model_copy(update={"learner": learner, "launch": config.launch.model_copy(update={"steps": 4})}))
    with running(run_dir, ranks=2) as processes:
        assert [processes[f"learner-{rank}"].wait(START_S) for rank in (0, 1)] == [0, 0], log_of(run_dir) + log_of(run_dir, "learner-1")
    assert [line["step"] for line in metrics_of(run_dir)] == [1, 2, 3, 4]
    assert "published" in log_of(run_dir) and run_dir.export.is_dir()


def test_b51_a_queue_that_dies_ends_the_learner_with_its_endpoint_in_the_last_line(tmp_path: Path):
    run_dir = new_run(tmp_path, steps=10_000)
    with running(run_dir) as processes:
        wait_for_step(run_dir, 1, processes["learner-0"])
        processes["queue"].kill()
        assert processes["learner-0"].wait(30) == 1
    last = log_of(run_dir).splitlines()[-1]
    assert "PeerTimeout" in last and run_dir.read_facts().queue_endpoints[0] in last


def test_a_rank_that_dies_ends_the_other_with_a_message(tmp_path: Path):
    run_dir = new_run(tmp_path, ranks=2, steps=10_000)
    with running(run_dir, ranks=2) as processes:
        wait_for_step(run_dir, 1, processes["learner-0"], processes["learner-1"])
        processes["learner-1"].kill()
        assert processes["learner-0"].wait(30) == 1
    assert "onnection" in log_of(run_dir).splitlines()[-1] or "a learner rank is gone" in log_of(run_dir).splitlines()[-1]
