"""``asyncrl queue serve`` as a process, joined by its folder alone; the example trainer runs against it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from queue_run import ROOT, group_for, kill, save_checkpoint, wait_for

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import ConfigError, UnsupportedError
from asyncrl.launch.guardian import remove_traces
from asyncrl.launch.preflight import check_config
from asyncrl.launch.serve import prepare_serve
from asyncrl.queue import Consumer, Observer, Producer

OPTIONS = ("task.name=none", "algorithm.groups_per_step=2", "algorithm.no_signal=keep")


@contextlib.contextmanager
def served(path: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own, killed at the end if it still runs."""
    command = [sys.executable, "-m", "asyncrl", "queue", "serve", str(path), *arguments]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        assert process.stdout is not None
        process.stdout.close()
        kill(process)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    yield path
    if (path / "run.json").exists():
        remove_traces(RunDir(path).read_facts().run_id)


async def finish(path: Path, number: int, version: int = 0, incarnation: int = 0) -> list[int]:
    """One producer's life: so many tickets, all finished."""
    producer = await Producer.join(path, "sampler-0")
    done: list[int] = []
    while len(done) < number:
        tickets = (await producer.tickets(version, number - len(done), wait_s=1.0)).tickets
        assert all(ticket.prompt == "" and ticket.prompt_id == str(ticket.ticket) for ticket in tickets)
        outcomes = await producer.put([group_for(ticket, version, incarnation=incarnation) for ticket in tickets])
        assert set(outcomes) <= {"accepted"}
        done += [ticket.ticket for ticket in tickets]
    await producer.close()
    await producer.close()
    return done


@pytest.mark.real
def test_a_served_queue_is_joined_by_its_folder_and_goes_on_when_it_is_served_again(run: Path) -> None:
    with served(run, *OPTIONS) as process:
        assert asyncio.run(finish(run, 4)) == [0, 1, 2, 3]
        with Consumer.join(run, "trainer-0") as consumer:
            assert [meta.ticket for meta in consumer.lease(0, wait_s=5.0).groups] == [0, 1]
            frontier = consumer.commit(0).frontier
        consumer.close()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None and b"Traceback" not in process.stderr.read()
    with served(run) as process:
        with Consumer.join(run, "trainer-0", restore=frontier) as consumer:
            assert [meta.ticket for meta in consumer.lease(1, wait_s=5.0).groups] == [2, 3]
        with Observer.join(run, "looker") as observer:
            status = observer.status()
            assert (status.step, status.trained, status.leased) == (1, 2, 2)
            observer.stop(exit=True)
        observer.close()
        assert process.wait(timeout=20) == 0
    with served(run):  # the stop was the earlier start's
        assert asyncio.run(finish(run, 1, version=1)) == [4]


@pytest.mark.real
def test_a_checkpoint_begins_the_next_incarnation_at_its_frontier(run: Path) -> None:
    with served(run, *OPTIONS):
        asyncio.run(finish(run, 4))
        with Consumer.join(run, "trainer-0") as old:
            old.lease(0, wait_s=5.0)
            checkpoint = save_checkpoint(RunDir(run), old.commit(0).frontier)
            old.lease(1, wait_s=5.0)
            assert old.commit(1).frontier.steps == 2
    with served(run, "--checkpoint", str(checkpoint)):
        wait_for(lambda: RunDir(run).read_facts().incarnation == 1, timeout_s=60.0)
        with Consumer.join(run, "trainer-0") as consumer:
            assert consumer.status().step == 1 and consumer.status().trained == 2


@pytest.mark.real
def test_several_shards_are_served_by_one_command(run: Path) -> None:
    with served(run, *OPTIONS, "queue.shards=2") as process:
        assert sorted(asyncio.run(finish(run, 4))) == [0, 1, 2, 3]
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 0


@pytest.mark.real
def test_the_example_trains_against_a_served_queue_and_goes_on_from_its_own_checkpoint(run: Path) -> None:
    def example(steps: int) -> str:
        command = [sys.executable, str(ROOT / "examples" / "own_trainer.py"), str(run), "--steps", str(steps)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with served(run, "task.name=none", "algorithm.groups_per_step=8", "algorithm.no_signal=keep"):
        assert example(2).startswith("step 2: ")
        said = example(8)
        assert "64 groups trained" in said and float(said.split("probability ")[1].split(";")[0]) > 0.25


@pytest.mark.real
def test_another_number_of_shards_is_refused_before_anything_is_written(run: Path) -> None:
    with served(run, *OPTIONS) as process:
        assert asyncio.run(finish(run, 1)) == [0]
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    with served(run, "queue.shards=2") as process:
        assert process.wait(timeout=60) == 2
        assert process.stderr is not None and b"holds the tickets of 1 shards" in process.stderr.read()
    assert RunDir(run).read_config().queue.shards == 1
    with served(run):
        assert asyncio.run(finish(run, 1)) == [1]


def test_training_refuses_tickets_without_prompts_and_serving_a_training_run(tmp_path: Path) -> None:
    run_dir = prepare_serve(tmp_path, OPTIONS)
    config, facts = run_dir.read_config(), run_dir.read_facts()
    remove_traces(facts.run_id)
    with pytest.raises(UnsupportedError, match="none has tickets without prompts"):
        check_config(config)
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    other.write_config(config)
    other.write_facts(facts.model_copy(update={"model_dir": "/models/tiny"}))
    with pytest.raises(ConfigError, match="holds a training run"):
        prepare_serve(other.path, ())
