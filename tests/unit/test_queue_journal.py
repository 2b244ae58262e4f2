"""What a group commit deletes: retained payload over the limit, and what a checkpoint has made needless."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from queue_folder import QueueFolder

from asyncrl.errors import DiskFull


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[QueueFolder]:
    queue = QueueFolder(tmp_path, durability="written")
    yield queue
    queue.close()


def train_steps(folder: QueueFolder, steps: int) -> None:
    """Two groups a step, all trained and retained."""
    for step in range(steps):
        for ticket in folder.issue(2):
            assert folder.finish(ticket) == "accepted"
        folder.train(step)
        folder.commit()


def retained(folder: QueueFolder, tickets: int) -> list[int]:
    return [ticket for ticket in range(tickets) if ticket in folder.opened.store]


def test_a_log_over_its_limit_loses_as_much_retained_payload_as_needed_oldest_first(folder: QueueFolder) -> None:
    train_steps(folder, 4)
    assert retained(folder, 8) == list(range(8))
    payload = folder.opened.store.payload(0)
    assert payload is not None
    folder.opened.journal._max_log_bytes = folder.opened.store.log_bytes - payload.num_bytes - 1
    folder.issue(1)
    folder.commit()
    assert retained(folder, 8) == [2, 3, 4, 5, 6, 7]


def test_a_full_disk_puts_off_what_a_checkpoint_deletes_and_stops_nobody(folder: QueueFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    train_steps(folder, 3)
    journal = folder.opened.journal
    ledger = journal._ledger
    assert ledger is not None

    def full(steps: int) -> None:
        raise DiskFull("the ledger cannot grow")

    with monkeypatch.context() as disk:
        disk.setattr(ledger, "steps_kept_from", full)
        journal.checkpointed(2)
        folder.issue(1)
        folder.commit()
        folder.commit()
    assert retained(folder, 6) == [4, 5]
    view = ledger.open_readonly(ledger.path)
    assert [row.step for row in view.steps()] == [0, 1, 2]
    folder.commit()
    assert [row.step for row in view.steps()] == [1, 2] and view.row(0) is None and view.row(4) is not None
    view.close()
