"""While the ledger cannot be written nobody is heard, and nobody is taken for dead or late because of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from queue_folder import QueueFolder

from asyncrl.errors import DiskFull
from asyncrl.queue.broker import Broker
from asyncrl.queue.durable.ledger_file import LedgerFile
from asyncrl.queue.prompts import TicketPrompts
from asyncrl.queue.service import QueueService
from asyncrl.tasks import new_source

LIMIT_S = 0.5


def full(*_: object) -> None:
    raise DiskFull("no room for the ledger")


def turn_for(broker: Broker, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        broker._turn()


def test_producers_and_tickets_outlive_a_ledger_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = QueueFolder(tmp_path, durability="written", dead_after_s=LIMIT_S, ticket_deadline_s=LIMIT_S)
    source = new_source(folder.config)
    service = QueueService(folder.opened, TicketPrompts(source, 0, LIMIT_S), folder.run_dir, 0)
    broker = Broker(folder.config, folder.facts, service, folder.facts.queue_endpoints[0])
    service.gate.hello("generator-0", time.monotonic())
    service.gate.issue("generator-0", 0, time.monotonic())
    with monkeypatch.context() as disk:
        disk.setattr(LedgerFile, "write", full)
        turn_for(broker, 3 * LIMIT_S)
    assert service.gate.fleet.knows("generator-0") and service.gate.status().generating == 1
    assert [record.attempt for record in service.gate.live()] == [0]
    turn_for(broker, 2 * LIMIT_S)  # the ledger can be written: its silence counts again
    assert not service.gate.fleet.knows("generator-0") and [record.attempt for record in service.gate.live()] == [1]
    broker.ending = True
    assert broker.run() == 0
