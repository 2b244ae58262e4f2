"""Real generator processes: real broker, real publisher, real vLLM, in a generator's own environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import generator_environment
import psutil
import pytest

pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM

import asyncrl
from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.launch.model_builders import build_tiny
from asyncrl.queue.client import Consumer, Observer
from asyncrl.sync.publisher import Publisher

pytestmark = pytest.mark.real
ROOT = Path(asyncrl.__file__).parent.parent
OPTIONS = {
    "algorithm": {"group_size": 4, "groups_per_step": 2, "no_signal": "keep"},
    "generator": {"max_new_tokens": 4, "max_groups": 4, "kv_cache_mib": 32, "device": "cpu"},
    "queue": {"max_staleness": 1},
    "task": {"eval_size": 20},
}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return generator_environment.build(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny(folder, dtype="float32", tied=False, seed=0)
    return folder


class Run:
    """A broker, a publisher in this process, and generators."""

    def __init__(self, folder, python, model_dir, **options):
        self.python = python
        self.config = Config.model_validate({**OPTIONS, **options})
        self.run_dir = RunDir(folder / "run")
        self.run_dir.path.mkdir()
        self.facts = RunFacts(
            run_id=f"process-{time.time_ns()}",
            incarnation=0,
            queue_endpoints=(f"ipc://{folder}/q",),
            sync_endpoint=f"ipc://{folder}/s",
            rendezvous="",
            model_dir=str(model_dir),
            generator_device="cpu",
            learner_device="cpu",
        )
        self.run_dir.write_config(self.config)
        self.run_dir.write_facts(self.facts)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.publisher = Publisher(self.config, self.facts, self.run_dir)
        self.processes = {"queue": self.start("queue", [sys.executable, "-m", "asyncrl.queue", str(self.run_dir.path)])}

    def start(self, name, command):
        with (self.run_dir.path / f"{name}.log").open("w") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True)

    def generator(self, name="generator-0"):
        command = [str(self.python), "-m", "asyncrl.generators", str(self.run_dir.path), "--name", name]
        self.processes[name] = self.start(name, command)
        return self.processes[name]

    def log(self, name="generator-0"):
        return (self.run_dir.path / f"{name}.log").read_text()

    def publish(self, version):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.01
        self.publisher.publish(version, iter(self.model.state_dict().items()), {})

    def batch(self, consumer, step):
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            lease = consumer.lease(step, wait_s=2.0)
            if lease.groups:
                groups, damaged = consumer.fetch(lease.groups)
                assert not damaged
                return list(groups.values())
        raise AssertionError(f"no batch for step {step}: {lease.blocked}\n{self.log()[-3000:]}")

    def close(self):
        self.publisher.close()
        for process in reversed(self.processes.values()):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def run(tmp_path, python, model_dir):
    made = []

    def make(**options):
        made.append(Run(tmp_path, python, model_dir, **options))
        return made[0]

    yield make
    for each in made:
        each.close()


def family(process):
    return [process, *psutil.Process(process.pid).children(recursive=True)]


def wait_gone(processes, timeout_s):
    pids = [process.pid for process in processes]
    deadline_s = time.monotonic() + timeout_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline_s, f"still there after {timeout_s} s"
        time.sleep(0.1)


def test_a_generator_feeds_three_steps_from_the_weights_that_were_published_and_ends_in_order_on_sigterm(run):
    rig = run()
    rig.publish(0)
    process = rig.generator()
    with Consumer.connect(rig.config, rig.facts, "learner-0") as consumer:
        for step in range(3):
            groups = rig.batch(consumer, step)
            assert [len(group.trajectories) for group in groups] == [4, 4]
            for trajectory in [t for group in groups for t in group.trajectories]:
                assert step - 1 <= trajectory.oldest_version <= step
                assert 1 <= trajectory.num_sampled_tokens <= 4 and trajectory.engine == "vllm"
                assert (trajectory.behavior_logprobs[trajectory.loss_mask] < 0).all()
            consumer.commit(step)
            rig.publish(step + 1)
        everyone, started_s = family(process), time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert time.monotonic() - started_s < 10.0
        wait_gone(everyone, 5.0)
    assert "generator-0 ended in order" in rig.log().splitlines()[-1]


def test_a_generator_ends_by_itself_when_the_queue_stops(run):
    rig = run()
    rig.publish(0)
    process = rig.generator()
    with Consumer.connect(rig.config, rig.facts, "learner-0") as consumer:
        rig.batch(consumer, 0)
    with Observer.connect(rig.config, rig.facts, "driver") as observer:
        observer.stop()
    assert process.wait(15) == 0


def test_a_killed_vllm_engine_ends_its_generator_with_a_message_and_leaves_nothing_behind(run):
    rig = run()
    rig.publish(0)
    process = rig.generator()
    with Consumer.connect(rig.config, rig.facts, "learner-0") as consumer:
        rig.batch(consumer, 0)
    everyone = family(process)
    workers = [child for child in everyone[1:] if "EngineCore" in " ".join(child.cmdline()) or "EngineCore" in child.name()]
    assert workers, [child.cmdline() for child in everyone[1:]]
    workers[0].kill()
    assert process.wait(30) == 1
    last = rig.log().splitlines()[-1]
    assert "generator-0 ends: " in last and ("died" in last or "dead" in last.lower()), last
    wait_gone(everyone, 10.0)
