"""Where a queue may listen, by its options alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.compose import compose
from asyncrl.errors import ConfigError, UnsupportedError
from asyncrl.launch.preflight import check_config, check_keys
from asyncrl.queue.keys import make_keys
from asyncrl.queue.settings import check_liveness

FAR = ["queue.transport=tcp", "queue.host=192.0.2.7", "queue.payload=inline"]


def test_off_this_machine_needs_keys_when_the_options_are_read() -> None:
    with pytest.raises(ConfigError, match="known keys alone"):
        compose(FAR)
    assert compose(["queue.transport=tcp"]).queue.host == "127.0.0.1"


def test_off_this_machine_needs_an_address_and_payload_that_travels(tmp_path: Path) -> None:
    keys = f"queue.keys={tmp_path}"
    with pytest.raises(ConfigError, match="name one address"):
        compose(["queue.transport=tcp", "queue.host=0.0.0.0", "queue.payload=inline", keys])
    with pytest.raises(ConfigError, match="shared memory does not reach"):
        compose([*FAR[:2], keys])
    with pytest.raises(ConfigError, match="listens at no address"):
        compose(["queue.host=192.0.2.7"])


def test_payload_that_stays_with_its_producer_needs_a_queue_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a log keeps it at the broker; met queue\.durability=written"):
        compose(["queue.payload=direct"])
    compose([*FAR[:2], "queue.payload=direct", "queue.durability=memory", f"queue.keys={tmp_path}"])
    with pytest.raises(ConfigError, match=r"queue\.payload=direct needs queue\.schedule=async"):
        check_liveness(compose(["queue=lockstep", "queue.payload=direct", "queue.durability=memory"]))


def test_training_stays_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="weights go out without keys"):
        check_config(compose([*FAR, f"queue.keys={tmp_path}"]))


def test_each_process_of_a_run_needs_a_key_that_is_allowed(tmp_path: Path) -> None:
    config = compose(["queue.transport=tcp", f"queue.keys={tmp_path}"])
    with pytest.raises(ConfigError, match=r"queue\.secret"):
        check_keys(config)
    make_keys(tmp_path, ["queue", "driver"])
    check_keys(config, ["driver"])
    (tmp_path / "allowed" / "driver.public").unlink()
    with pytest.raises(ConfigError, match="driver is missing"):
        check_keys(config, ["driver"])
