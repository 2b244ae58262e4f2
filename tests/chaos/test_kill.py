"""kill -9 of each process of a real run: it heals, or ends with a message that names what died; nothing is left behind."""

import os
import signal
import time

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
def run(tmp_path):
    """A real run with a checkpoint behind it."""
    run_dir = tmp_path / "run"
    driver = start_run(run_dir, *QUICK)
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


@pytest.mark.parametrize(("module", "argument", "name"), [("asyncrl.queue", "", "queue"), ("asyncrl.learner", "--rank 0", "learner-0")])
def test_the_death_of_broker_or_learner_ends_the_run_and_is_named(run, module, argument, name):
    check = assert_ended_naming(run, name)
    next(check)
    os.kill(find(run[0], module, argument), signal.SIGKILL)
    next(check, None)


def test_a_run_heals_after_its_vllm_worker_was_killed(run):
    run_dir, driver = run
    generator = find(run_dir, "asyncrl.generators")
    workers = [pid for pid in descendants(generator) if "VLLM" in _title(pid) or "spawn_main" in commands().get(pid, "")]
    assert workers, {pid: commands().get(pid) for pid in descendants(generator)}
    old = descendants(generator) | {generator}
    os.kill(workers[0], signal.SIGKILL)
    _assert_healed(run_dir, driver, old)
    assert "generator-0 died" in console(run_dir) and "starting it again" in console(run_dir)


def test_a_run_heals_after_a_launcher_was_killed(run):

    run_dir, driver = run
    generator = find(run_dir, "asyncrl.generators")
    old = descendants(generator) | {generator}
    launcher = _launcher_pid(run_dir)
    os.kill(launcher, signal.SIGKILL)
    _assert_healed(run_dir, driver, old)
    assert "generator-0 died (its launcher died)" in console(run_dir)


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


def _assert_healed(run_dir, driver, old):
    killed, before = time.monotonic(), metrics(run_dir)[-1]["step"]
    wait_until(lambda: not (old & set(commands())), 15, "old generator gone")
    wait_until(lambda: "starting it again" in console(run_dir), 15, "restart")
    # the replica's own start-up (engine import and load) is the floor of what follows
    wait_until(lambda: metrics(run_dir)[-1]["step"] > before + 3, 120, "training goes on")
    assert driver.poll() is None
    return time.monotonic() - killed


def _title(pid):
    with open(f"/proc/{pid}/comm") as file:
        return file.read()


def _launcher_pid(run_dir):
    """The launcher is the parent of the reaper that runs the generator."""
    reapers = [
        pid for pid, text in commands().items() if "asyncrl.launch.reaper" in text and "asyncrl.generators" in text and str(run_dir) in text
    ]
    assert len(reapers) == 1
    with open(f"/proc/{reapers[0]}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
