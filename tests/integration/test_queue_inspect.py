"""`asyncrl queue ls|show|verify|tail` on what a broker's own parts wrote: live, dead, and damaged."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from queue_folder import QueueFolder

from asyncrl.cli import main
from asyncrl.queue.durable.ledger_file import LedgerFile
from asyncrl.queue.durable.rows import Changes, GroupRow
from asyncrl.queue.inspect import open_shards
from asyncrl.queue.tail import follow
from asyncrl.queue.verify import verify


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[QueueFolder]:
    """Tickets 0 and 1 trained, 2 and 3 queued, 4 failed once and waits, 5 being sampled, 6 dropped for equal rewards."""
    folder = QueueFolder(tmp_path / "run")
    folder.issue(7)
    for ticket in range(4):
        assert folder.finish(ticket) == "accepted"
    folder.train(0)
    folder.gate.fail("generator-0", 4, 0, "the reward hung")
    assert folder.finish(6, rewards=(1.0, 1.0)) == "no_signal"
    folder.commit()
    yield folder
    folder.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["queue", *arguments])
    return code, capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json")[1])


def test_ls_has_one_aligned_line_a_live_group_and_the_counts(queue: QueueFolder, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "ls", str(queue.run_dir.path))
    lines = text.splitlines()
    assert code == 0 and lines[0].split() == ["ticket", "state", "attempt", "producer", "versions", "lag", "bytes", "age", "s", "reason"]
    assert [line.split()[:4] for line in lines[1:-1]] == [
        ["2", "queued", "0", "generator-0"],
        ["3", "queued", "0", "generator-0"],
        ["4", "reissue", "1", "generator-0"],
        ["5", "generating", "0", "generator-0"],
    ]
    assert lines[3].endswith("the reward hung")
    assert len({line.index("generator-0") for line in lines[1:-1]}) == 1
    assert lines[-1] == "1 generating; 1 reissue; 2 queued; 0 leased; 2 trained; 1 dropped"


def test_ls_tells_lag_bytes_and_age_of_what_was_finished(queue: QueueFolder, capsys: pytest.CaptureFixture[str]) -> None:
    groups = {each["ticket"]: each for each in as_json(capsys, "ls", str(queue.run_dir.path))["groups"]}
    assert (groups[2]["lag"], groups[2]["versions"]) == (1, [0])
    assert groups[2]["num_bytes"] > 1000 and 5.0 <= groups[2]["age_s"] < 60.0
    assert (groups[5]["num_bytes"], groups[5]["age_s"]) == (0, -1.0)
    trained = as_json(capsys, "ls", str(queue.run_dir.path), "--state", "trained")["groups"]
    assert [each["ticket"] for each in trained] == [0, 1]
    assert [each["ticket"] for each in as_json(capsys, "ls", str(queue.run_dir.path), "--limit", "1")["groups"]] == [2]


def test_show_tells_the_row_and_every_trajectory(queue: QueueFolder, capsys: pytest.CaptureFixture[str]) -> None:
    known = as_json(capsys, "show", str(queue.run_dir.path), "3")
    assert (known["state"], known["attempt"], known["meta"]["group_id"], known["payload"]["problem"]) == ("queued", 0, "g3", "")
    assert [
        (t["sibling"], t["tokens"], t["prompt"], t["sampled"], t["reward"], t["versions"], t["seconds"])
        for t in known["payload"]["trajectories"]
    ] == [
        (0, 5, 2, 3, 0.0, [0], 1.0),
        (1, 5, 2, 3, 1.0, [0], 1.0),
    ]
    code, text = run(capsys, "show", str(queue.run_dir.path), "3")
    assert code == 0 and "finish_reason" in text and "group_id" in text
    assert main(["queue", "show", str(queue.run_dir.path), "99"]) == 2
    assert "ticket 99 is not in" in capsys.readouterr().err


def test_verify_reads_every_payload_of_a_live_and_of_a_dead_queue(queue: QueueFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        verdict = as_json(capsys, "verify", str(queue.run_dir.path))
        assert verdict["sound"] and verdict["damage"] == verdict["miscounts"] == []
        assert (verdict["num_payloads"], verdict["admitted"], verdict["trained"], verdict["in_flight"]) == (4, 7, 2, 4)
        assert verdict["dropped"] == {"no_signal": 1}
        queue.close()
    code, text = run(capsys, "verify", str(queue.run_dir.path))
    assert code == 0 and text.splitlines()[1] == "7 admitted = 2 trained + 1 dropped + 4 in flight"


def test_verify_finds_a_flipped_bit_and_names_the_group(queue: QueueFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with open_shards(queue.run_dir.path) as (files,):
        row = files.view.row(3)
    assert row is not None and row.place is not None
    log = queue.run_dir.queue / "shard-0" / "log" / f"segment-{row.place.segment:08d}.log"
    with log.open("r+b") as file:
        file.seek(row.place.offset + row.place.length // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    code, text = run(capsys, "verify", str(queue.run_dir.path))
    assert code == 1 and "4 payloads" in text and "1 damaged" in text
    assert "! ticket 3, attempt 0, queued: checksum differs" in text


def test_verify_finds_a_log_that_is_gone(queue: QueueFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (queue.run_dir.queue / "shard-0" / "log").glob("segment-*.log"):
        file.unlink()
    code, text = run(capsys, "verify", str(queue.run_dir.path))
    assert code == 1 and "! ticket 2, attempt 0, queued: " in text and "4 damaged" in text
    assert main(["queue", "ls", str(queue.run_dir.path)]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DELETE FROM groups WHERE ticket = 5", "1 tickets were issued and are neither live nor settled: 5"),
        ("UPDATE groups SET state = 'trained' WHERE ticket = 2", "the row of ticket 2 is damaged in the ledger"),
        ("DELETE FROM payloads WHERE ticket = 2", "ticket 2, attempt 0, queued: no payload of ticket 2 is kept"),
    ],
)
def test_verify_finds_what_does_not_add_up(queue: QueueFolder, capsys: pytest.CaptureFixture[str], change: str, said: str) -> None:
    queue.close()
    with sqlite3.connect(queue.run_dir.queue / "shard-0" / "ledger.sqlite") as connection:
        connection.execute(change)
    connection.close()
    code, text = run(capsys, "verify", str(queue.run_dir.path))
    assert code == 1 and said in text


def test_verify_finds_groups_that_ledger_and_frontier_count_differently(queue: QueueFolder, capsys: pytest.CaptureFixture[str]) -> None:
    queue.close()
    ledger = LedgerFile(queue.run_dir.queue / "shard-0" / "ledger.sqlite", queue.facts.run_id, 0, 1)
    ledger.write(
        Changes(groups=tuple(GroupRow(ticket=ticket, attempt=0, state=state) for ticket, state in ((2, "trained"), (1, "generating"))))
    )
    ledger.close()
    code, text = run(capsys, "verify", str(queue.run_dir.path))
    assert code == 1
    assert "1 tickets are settled in the ledger and not in the frontier: 2" in text
    assert "1 tickets are live in the ledger and settled in the frontier: 1" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trained": 7}, "but 7 trained and 1 dropped"),
        ({"dropped": {"weather": 0}}, "its reasons are no_signal, "),
    ],
)
def test_verify_finds_a_frontier_that_does_not_add_up(
    queue: QueueFolder, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    state = queue.gate.state()
    queue.close()
    ledger = LedgerFile(queue.run_dir.queue / "shard-0" / "ledger.sqlite", queue.facts.run_id, 0, 1)
    wrong = msgspec.structs.replace(state, frontier=msgspec.structs.replace(state.frontier, **change))
    ledger.write(Changes(groups=(), state=msgspec.msgpack.encode(wrong)))
    ledger.close()
    code, text = run(capsys, "verify", str(queue.run_dir.path))
    assert code == 1 and said in text


def test_looking_writes_nothing_and_stops_nobody(queue: QueueFolder) -> None:
    with open_shards(queue.run_dir.path) as (files,), files.moment():
        before = files.view.counts()
        queue.issue(1)
        queue.commit()
        assert files.view.counts() == before  # the moment holds while the broker goes on
    with open_shards(queue.run_dir.path) as shards:
        assert shards[0].view.counts()["generating"] == before["generating"] + 1
        assert verify(shards).sound


def test_tail_shows_the_last_commits_and_those_that_come(queue: QueueFolder) -> None:
    looks = iter([False, True])
    seen = list(follow(queue.run_dir.path, 0.01, ended=lambda: _trained(queue, looks)))
    assert [each.step for each in seen if each.kind == "commit"] == [0, 1]
    assert seen[0].text.startswith("step 0: 2 trained, dropped: 1 no_signal; settled below 2")
    assert [each.text for each in seen if each.kind == "broker"] == ["no broker answers: only what was written can be seen"]


def _trained(queue: QueueFolder, looks: Iterator[bool]) -> bool:
    last = next(looks)
    if not last:
        queue.train(1)
        queue.commit()
    return last


def test_shards_are_looked_at_together_and_a_missing_one_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [QueueFolder(tmp_path / "run", shard=number, shards=2) for number in range(2)]
    for folder in folders:
        folder.issue(2)
        folder.commit()
        folder.close()
    assert [each["ticket"] for each in as_json(capsys, "ls", str(tmp_path / "run"))["groups"]] == [0, 1, 2, 3]
    assert as_json(capsys, "show", str(tmp_path / "run"), "3")["shard"] == 1
    assert as_json(capsys, "verify", str(tmp_path / "run"))["admitted"] == 4
    (tmp_path / "run" / "queue" / "shard-0" / "ledger.sqlite").unlink()
    assert main(["queue", "ls", str(tmp_path / "run")]) == 2
    assert f"holds every shard of one run; met run '{folders[0].facts.run_id}', shard 1 of 2" in capsys.readouterr().err


def test_a_folder_without_a_ledger_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["queue", "verify", str(tmp_path)]) == 2
    assert "is no run directory, or its queue.durability is memory" in capsys.readouterr().err
