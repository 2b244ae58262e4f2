"""Key files: made once, closed to others, checked before a socket exists."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from asyncrl.cli import main
from asyncrl.config.network import check_exposure
from asyncrl.errors import ConfigError
from asyncrl.queue.keys import make_keys, public_keys, read_public, read_secret


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_is_closed_to_others_from_its_first_byte_and_fits_its_public_half(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        make_keys(tmp_path / "keys", ["queue", "generator-0"])
    finally:
        os.umask(old)
    folder = tmp_path / "keys"
    assert [mode(path) for path in sorted(folder.glob("*.secret"))] == [0o600, 0o600]
    assert mode(folder) == mode(folder / "allowed") == 0o700
    assert zmq.curve_public(read_secret(folder, "queue")) == read_public(folder, "queue")
    assert read_public(folder, "queue") != read_public(folder, "generator-0")
    names, problems = public_keys(folder / "allowed")
    assert names == {read_public(folder, "queue"): "queue", read_public(folder, "generator-0"): "generator-0"} and not problems


@pytest.mark.parametrize("wide", [0o644, 0o640, 0o604, 0o660, 0o601])
def test_a_secret_that_others_may_read_is_refused_with_the_fix(tmp_path: Path, wide: int) -> None:
    make_keys(tmp_path, ["queue"])
    (tmp_path / "queue.secret").chmod(wide)
    with pytest.raises(ConfigError, match=rf"has mode {wide:03o}: chmod 600 {tmp_path}/queue.secret, or make another key"):
        read_secret(tmp_path, "queue")


def test_a_folder_that_others_may_write_to_allows_nobody(tmp_path: Path) -> None:
    make_keys(tmp_path, ["queue"])
    (tmp_path / "allowed").chmod(0o770)
    with pytest.raises(ConfigError, match=f"its mode is 770: chmod go-w {tmp_path}/allowed"):
        public_keys(tmp_path / "allowed")


def test_a_key_is_not_overwritten_and_nothing_is_written_when_one_of_the_names_has_a_key(tmp_path: Path) -> None:
    make_keys(tmp_path, ["queue"])
    before = (tmp_path / "queue.secret").read_bytes()
    with pytest.raises(ConfigError, match=r"queue\.secret is there: remove it if queue shall have another key"):
        make_keys(tmp_path, ["new", "queue"])
    assert (tmp_path / "queue.secret").read_bytes() == before and not (tmp_path / "new.secret").exists()


@pytest.mark.parametrize("name", ["", "../queue", "a/b", ".hidden", "a" * 65, "a\nb", "a b"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="the name of a key has 1 to 64 letters"):
        make_keys(tmp_path, [name])
    with pytest.raises(ConfigError, match="the name of a key has 1 to 64 letters"):
        read_secret(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"x" * 39, b"x" * 41, b"\xff" * 40, b"~" * 40, b"x" * 100_000])
def test_a_file_without_a_key_is_named_with_what_was_met(tmp_path: Path, content: bytes) -> None:
    make_keys(tmp_path, ["queue"])
    (tmp_path / "allowed" / "queue.public").write_bytes(content)
    names, problems = public_keys(tmp_path / "allowed")
    assert names == {} and len(problems) == 1
    assert f"{tmp_path}/allowed/queue.public holds one key of 40 characters (Z85); met {min(len(content), 4096)} bytes" in problems[0]


def test_a_missing_key_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"queue\.secret holds a key; it cannot be read \(No such file.*asyncrl keys {tmp_path} queue"):
        read_secret(tmp_path, "queue")
    with pytest.raises(ConfigError, match="allowed; met No such file or directory: `asyncrl keys` makes it"):
        public_keys(tmp_path / "allowed")


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5555", "tcp://127.8.9.1:*", "tcp://[::1]:5555", "tcp://localhost:5555", "ipc:///run/q", "inproc://q"]
)
def test_what_stays_on_this_machine_needs_no_keys(endpoint: str) -> None:
    check_exposure(endpoint, "")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5555",
        "tcp://0.0.0.0:5555",
        "tcp://[::]:5555",
        "tcp://10.0.0.7:5555",
        "tcp://node7:5555",
        "tcp://eth0:1",
        "tcp://",
        "ws://127.0.0.1:5555",
        "tcp://localhost.example.org:5555",
        "tcp://127.0.0.1.example.org:1",
        "127.0.0.1:5555",
    ],
)
def test_what_other_machines_may_reach_is_refused_without_keys_and_taken_with_them(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"lets in known keys alone; met .* no queue\.keys: make keys with `asyncrl keys DIR NAME…`"):
        check_exposure(endpoint, "")
    check_exposure(endpoint, "keys")


def test_the_command_prints_what_it_wrote_and_says_why_it_did_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path), "queue", "learner-0"]) == 0
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 6 and all(path.is_file() for path in printed)
    assert main(["keys", str(tmp_path), "queue"]) == 2
    assert "a key is never overwritten" in capsys.readouterr().err


def test_the_rule_of_exposure_is_checked_without_zmq() -> None:
    code = "import sys; import asyncrl.queue.keys, asyncrl.launch.queue_commands; print('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
