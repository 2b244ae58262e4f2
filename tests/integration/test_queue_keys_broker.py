"""A real broker with keys over tcp: known clients pass, everyone else is refused and counted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from queue_run import broker, wait_for

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir
from asyncrl.errors import ConfigError, PeerTimeout, QueueError
from asyncrl.launch.guardian import remove_traces
from asyncrl.launch.serve import prepare_serve
from asyncrl.queue import Consumer, Observer
from asyncrl.queue.keys import make_keys

pytestmark = pytest.mark.real


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    make_keys(tmp_path / "keys", ["queue", "driver", "learner-0"])
    options = ["task.name=none", "queue.transport=tcp", f"queue.keys={tmp_path / 'keys'}", "queue.dead_after_s=10.0"]
    run_dir = prepare_serve(tmp_path / "run", options)
    yield run_dir
    remove_traces(run_dir.read_facts().run_id)


def with_keys(config: Config, keys: Path) -> Config:
    return config.model_copy(update={"queue": config.queue.model_copy(update={"keys": str(keys)})})


def test_a_known_client_passes_and_strangers_are_refused_and_counted(run_dir: RunDir, tmp_path: Path) -> None:
    config, facts = run_dir.read_config(), run_dir.read_facts()
    stranger, deceived, keys = tmp_path / "stranger", tmp_path / "deceived", tmp_path / "keys"
    make_keys(stranger, ["learner-0"])
    shutil.copy(keys / "queue.public", stranger)
    shutil.copytree(keys, deceived)
    make_keys(tmp_path / "impostor", ["queue"])
    shutil.copy(tmp_path / "impostor" / "queue.public", deceived)
    with broker(run_dir), Observer.connect(config, facts, "driver") as observer:

        def refused() -> dict[str, Any]:
            return observer.status().refused

        with Consumer.connect(config, facts, "learner-0") as consumer:
            assert consumer.status().step == 0
        with pytest.raises(PeerTimeout, match="lets in the key of learner-0"):
            Consumer.connect(with_keys(config, stranger), facts, "learner-0", timeout_s=1.0)
        wait_for(lambda: refused().get("unknown_key", 0) > 0, timeout_s=20.0)
        for folder in (deceived, None):
            before = refused().get("handshake", 0)
            with pytest.raises(PeerTimeout):
                Consumer.connect(with_keys(config, folder) if folder else Config(), facts, "learner-0", timeout_s=1.0)
            wait_for(lambda before=before: refused().get("handshake", 0) > before, timeout_s=20.0)


def test_a_client_under_anothers_key_and_one_whose_secret_others_may_read_are_refused(run_dir: RunDir, tmp_path: Path) -> None:
    config, facts, keys = run_dir.read_config(), run_dir.read_facts(), tmp_path / "keys"
    renamed = tmp_path / "renamed"
    shutil.copytree(keys, renamed)
    shutil.copy(keys / "driver.secret", renamed / "learner-0.secret")
    with broker(run_dir):
        with pytest.raises(QueueError, match="learner-0 came under the key of driver"):
            Consumer.connect(with_keys(config, renamed), facts, "learner-0", timeout_s=20.0)
        (keys / "learner-0.secret").chmod(0o644)
        with pytest.raises(ConfigError, match="chmod 600"):
            Consumer.connect(config, facts, "learner-0", timeout_s=1.0)


def test_a_broker_does_not_start_with_a_secret_that_others_may_read(run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "keys" / "queue.secret").chmod(0o644)
    with broker(run_dir) as process:
        assert process.wait(timeout=60) == 1
        assert process.stderr is not None and b"chmod 600" in process.stderr.read()
