"""A broker that starts on a full disk: it says so once, holds everybody back, and begins when there is room."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from durable_setup import flip, segment_path
from queue_folder import QueueFolder

import asyncrl.queue.opening as opening
from asyncrl.errors import DiskFull, QueueError
from asyncrl.queue.durable.ledger_file import LedgerFile
from asyncrl.queue.durable.ledger_view import ledger_errors
from asyncrl.queue.durable.rows import Changes
from asyncrl.queue.opening import Opened, open_queue, when_there_is_room
from asyncrl.queue.settings import GateSettings

BROKER = """
import sys
from pathlib import Path
from asyncrl.errors import DiskFull
from asyncrl.queue.__main__ import main
from asyncrl.queue.durable.ledger_file import LedgerFile

write = LedgerFile.write
def write_if_there_is_room(self, changes):
    if Path(sys.argv[1], "full").exists():
        raise DiskFull("no room for the ledger")
    write(self, changes)
LedgerFile.write = write_if_there_is_room
sys.exit(main(sys.argv[1:]))
"""


def refuse(monkeypatch: pytest.MonkeyPatch, refused: tuple[int, ...]) -> None:
    """Writes of a ledger of these numbers, counted from here on, find no room."""
    write, number = LedgerFile.write, itertools.count()

    def full_at_times(ledger: LedgerFile, changes: Changes) -> None:
        if next(number) in refused:
            raise DiskFull("no room for the ledger")
        write(ledger, changes)

    monkeypatch.setattr(LedgerFile, "write", full_at_times)


def reopened(queue: QueueFolder) -> Opened:
    settings = GateSettings.from_config(queue.config, None, 0)
    return when_there_is_room(lambda: open_queue(queue.run_dir, queue.config, queue.facts, settings, None))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "RETRY_S", 0.0)


@pytest.mark.parametrize("refused", [(0,), (1,), (0, 1, 3)])
def test_what_a_full_disk_interrupts_at_the_start_is_done_anew_and_comes_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: tuple[int, ...]
) -> None:
    queue = QueueFolder(tmp_path, durability="written", order="uniform")
    for ticket in queue.issue(3):
        queue.finish(ticket)
    queue.commit()
    place = queue.opened.store.payload(0).place  # type: ignore[union-attr]
    assert place is not None
    queue.close()
    flip(segment_path(tmp_path / "queue" / "shard-0", place), place.offset)
    refuse(monkeypatch, refused)
    opened = reopened(queue)
    assert {record.ticket: (record.state, record.attempt) for record in opened.gate.live()} == {
        0: ("reissue", 1),
        1: ("queued", 0),
        2: ("queued", 0),
    }
    assert opened.gate.state().inserted == 2 and [ticket in opened.store for ticket in range(3)] == [False, True, True]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "every client is held back until the queue can be opened: no room for the ledger"
    ]
    opened.journal.close()
    opened.store.close()


def test_an_error_that_tells_of_no_full_disk_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = [OSError(errno.ENOSPC, "no space"), OSError(errno.EDQUOT, "quota"), OSError(errno.EIO, "broken")]

    def broken() -> Opened:
        raise met.pop(0)

    with pytest.raises(OSError, match="broken"):
        when_there_is_room(broken)


@pytest.mark.parametrize(("free_bytes", "kind"), [(4096, DiskFull), (1 << 20, QueueError)])
def test_a_file_beside_the_ledger_that_finds_no_room_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, kind: type[Exception]
) -> None:
    disk = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, *disk[2:4], free_bytes, *disk[5:])))
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    with pytest.raises(kind, match="disk I/O error"), ledger_errors(tmp_path / "ledger.sqlite"):
        raise error


def test_a_broker_that_is_held_back_begins_when_there_is_room_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    QueueFolder(tmp_path, durability="written").close()
    for told_while_full in (False, True):
        (tmp_path / "full").touch()
        (tmp_path / "queue" / "shard-0" / "ledger.sqlite").unlink()
        with (tmp_path / "said").open("w") as said:
            broker = subprocess.Popen([sys.executable, "-c", BROKER, str(tmp_path)], stderr=said)
        wait_for(tmp_path / "said", "every client is held back until the queue can be opened: no room for the ledger")
        if not told_while_full:
            (tmp_path / "full").unlink()
            wait_for(tmp_path / "said", "listening at ")
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(20.0) == 0
        assert (tmp_path / "said").read_text().count("ERROR") == 1


def wait_for(file: Path, text: str) -> None:
    deadline_s = time.monotonic() + 20.0
    while text not in file.read_text():
        assert time.monotonic() < deadline_s, file.read_text()
        time.sleep(0.05)
