"""kill -9 of each process of a real run: it heals, or ends with a message that names what died; nothing is left behind."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from run_process import belonging_to, commands, console, descendants, everything_of, find, metrics, start_run, summary, wait_until

pytestmark = pytest.mark.real

QUICK = (
    "recipe=tiny",
    "launch.steps=100000",
    "launch.target_reward=0",
    "launch.checkpoint_every=5",
    "monitor.live=plain",
    "monitor.tensorboard=false",
)
HEAL_S = 30.0


@pytest.fixture
def run(tmp_path, request):
    """A real run with a checkpoint behind it; its parameter holds further options."""
    run_dir = tmp_path / "run"
    driver = start_run(run_dir, *QUICK, *getattr(request, "param", ()))
    try:
        wait_until(
            lambda: (run_dir / "checkpoints" / "step-000005" / "manifest.json").exists() or driver.poll() is not None, 240, "checkpoint"
        )
        assert driver.poll() is None, console(run_dir)
        yield run_dir, driver
    finally:
        driver.kill()
        driver.wait()
        wait_until(lambda: not belonging_to(run_dir), 60, f"all processes gone, left: {belonging_to(run_dir)}")


def assert_nothing_left(run_dir, pids):
    wait_until(lambda: not (pids & set(commands())), 10, f"left behind: {[commands().get(p) for p in pids if p in commands()]}")


def assert_ended_naming(run, name):
    run_dir, driver = run
    pids = everything_of(run_dir) - {driver.pid}
    killed = time.monotonic()
    yield
    wait_until(lambda: driver.poll() is not None, HEAL_S - (time.monotonic() - killed), f"end of the run after the death of {name}")
    assert driver.returncode == 1
    assert f"{name} died (killed by SIGKILL)" in summary(run_dir)["message"]
    assert f"asyncrl resume {run_dir}" in console(run_dir)
    assert_nothing_left(run_dir, pids)
    assert not list(Path("/dev/shm").glob(f"asyncrl-{json.loads((run_dir / 'run.json').read_text())['run_id']}.*"))


TWO = pytest.mark.parametrize("run", [("generator.replicas=2",)], indirect=True)


@TWO
def test_a_run_goes_on_over_a_dead_broker_and_a_dead_vllm_worker(run):
    """The broker starts again over its log; the other replica takes the tickets of the dead worker's, which is started again."""
    run_dir, driver = run
    for name in ("generator-0", "generator-1"):
        _wait_for_replica(run_dir, name)
    _assert_healed(run_dir, driver, "queue", find(run_dir, "asyncrl.queue"), find(run_dir, "asyncrl.queue"))
    assert "queue died (killed by SIGKILL)" in console(run_dir) and "starting it again over its log" in console(run_dir)

    generator = find(run_dir, "asyncrl.generators", "generator-0")
    workers = _workers(generator)
    assert len(workers) == 1, {pid: _title(pid) for pid in descendants(generator)}
    _assert_healed(run_dir, driver, "generator-0", generator, workers[0])
    assert "generator-0 died (exit code 1)" in console(run_dir)


@TWO
def test_a_run_goes_on_over_a_dead_launcher_and_ends_with_a_dead_learner(run):
    run_dir, driver = run
    _wait_for_replica(run_dir, "generator-1")
    generator = find(run_dir, "asyncrl.generators", "generator-1")
    _assert_healed(run_dir, driver, "generator-1", generator, _launcher_pid(run_dir, "generator-1"))
    assert "generator-1 died (its launcher died)" in console(run_dir)

    check = assert_ended_naming(run, "learner-0")
    next(check)
    os.kill(find(run_dir, "asyncrl.learner", "--rank 0"), signal.SIGKILL)
    next(check, None)
    found = summary(run_dir)
    assert found["restarts"] == {"generator-1": 1}
    assert found["admitted"] == found["trained"] + sum(found["dropped"].values()) + found["in_flight"]


def test_the_death_of_the_driver_ends_the_run_with_a_checkpoint_and_a_message(run):
    run_dir, driver = run
    pids = everything_of(run_dir) - {driver.pid}
    assert len(pids) >= 6
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not (pids & set(commands())), HEAL_S, f"left behind: {[commands().get(p) for p in pids if p in commands()]}")
    assert "the driver died" in summary(run_dir)["message"]
    newest = sorted((run_dir / "checkpoints").glob("step-*/manifest.json"))[-1].parent.name
    assert int(newest.removeprefix("step-")) == metrics(run_dir)[-1]["step"]


def _wait_for_replica(run_dir, name):
    """The first steps need one replica only: the other may still be starting its engine."""
    wait_until(lambda: f"{name} says hello" in (run_dir / "logs" / "queue.log").read_text(), 120, f"{name} serves")


def _assert_healed(run_dir, driver, name, process, victim):
    """Within 30 s of kill -9 of something below a process the dead are gone, a new one is on its way, and training goes on."""
    old = descendants(process) | {process}
    before, said, killed = metrics(run_dir)[-1]["step"], console(run_dir).count("starting it again"), time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def healed():
        again = console(run_dir).count("starting it again") > said
        return again and not old & set(commands()) and metrics(run_dir)[-1]["step"] > before + 3

    wait_until(lambda: healed() or driver.poll() is not None, HEAL_S, f"healed after the death of {name}; it stood at step {before}")
    assert driver.poll() is None, console(run_dir)
    print(f"{name}: healed {time.monotonic() - killed:.1f} s after kill -9")


def _workers(generator):
    return [pid for pid in descendants(generator) if "Worker" in _title(pid)]


def _title(pid):
    """Its name; empty when it is gone by now."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def _launcher_pid(run_dir, name):
    """The launcher is the parent of the reaper that runs the generator."""
    reapers = [pid for pid, text in commands().items() if "asyncrl.launch.reaper" in text and name in text and str(run_dir) in text]
    assert len(reapers) == 1
    with open(f"/proc/{reapers[0]}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
