"""What a group commit deletes: retained payload over the limit, and what a checkpoint has made needless."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from queue_folder import QueueFolder


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
