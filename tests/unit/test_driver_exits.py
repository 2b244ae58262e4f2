"""What the driver does when a process of its run ends: starts it again, or ends the run and names it. Launchers and queue are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import PeerTimeout, ProcessDied
from asyncrl.launch.driver import Driver
from asyncrl.launch.supervisor import Exit, ProcessSpec


class Launchers:
    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, spec: ProcessSpec) -> None:
        self.started.append(spec.name)


class Queue:
    """Hears of deaths, or is dead itself."""

    def __init__(self, *, dead: bool = False) -> None:
        self.dead = dead
        self.told: list[str] = []

    def producer_gone(self, name: str) -> None:
        if self.dead:
            raise PeerTimeout("the queue answers within 2.0 s")
        self.told.append(name)


def exits(tmp_path: Path, *names: str, heard: Queue | None = None, **options: Any) -> list[str]:
    """Lets processes end one after the other; the names of those that were started again."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.write_config(Config.model_validate({"monitor": {"live": "plain"}, **options}))
    run_dir.write_facts(
        RunFacts(
            run_id="r",
            incarnation=0,
            queue_endpoints=("ipc:///q",),
            sync_endpoint="",
            rendezvous="",
            model_dir="",
            generator_device="cpu",
            learner_device="cpu",
        )
    )
    driver: Any = Driver(run_dir)
    driver._specs = {name: ProcessSpec(name=name, command=("true",)) for name in names}
    launchers = Launchers()
    for name in names:
        driver._on_exit(Exit(name=name, code=137, last_line="so long"), launchers, heard or Queue())
    return launchers.started


@pytest.mark.parametrize("durability", ["written", "synced"])
def test_a_broker_with_a_log_is_started_again(tmp_path: Path, durability: str) -> None:
    assert exits(tmp_path, "queue", queue={"durability": durability}) == ["queue"]


def test_a_broker_that_keeps_all_in_memory_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match=r"queue died \(killed by SIGKILL\); its last line: so long"):
        exits(tmp_path, "queue", queue={"durability": "memory"})


def test_a_learner_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match="learner-0 died"):
        exits(tmp_path, "learner-0")


def test_a_generator_is_started_again_and_its_death_told(tmp_path: Path) -> None:
    queue = Queue()
    assert exits(tmp_path, "generator-1", heard=queue) == ["generator-1"] == queue.told


def test_a_generator_is_started_again_though_the_queue_is_dead_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(tmp_path, "generator-1", heard=Queue(dead=True)) == ["generator-1"]
    assert "the queue was not told of it" in capsys.readouterr().err


def test_whoever_dies_too_often_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match="it was restarted 2 times"):
        exits(tmp_path, *["generator-0"] * 3, launch={"max_restarts": 2})
