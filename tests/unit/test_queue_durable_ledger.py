import random
import sqlite3
import subprocess
import sys

import msgspec
import pytest
from durable_setup import frontier, meta_of, new_ledger, queued

from asyncrl.errors import DataError, DiskFull
from asyncrl.queue.durable.ledger_file import LedgerFile
from asyncrl.queue.durable.place import Place
from asyncrl.queue.durable.rows import Changes, GroupRow, StepRow

TOP = (1 << 64) - 1


def row_of(ticket: int, state: str = "queued", step: int = -1, attempt: int = 0, **more: object) -> GroupRow:
    return queued((Place(0, 320 + 64 * ticket, 5), ticket, attempt, TOP), state, step, **more)


def step_row(step: int, low: int, *above: int) -> StepRow:
    return StepRow(step=step, incarnation=1, frontier=frontier(step + 1, low, above), committed_s=100.5 + step)


def test_a_fresh_file_holds_nothing_and_a_written_one_comes_back_equal(tmp_path):
    ledger = new_ledger(tmp_path)
    assert ledger.created and ledger.load() is None
    live = (row_of(2, reasons=("attempt 0: died",), attempt=1), GroupRow(ticket=3, attempt=0, state="generating", producer="g", version=7))
    kept = row_of(0, "trained", 4, uses=2)
    ledger.write(Changes(groups=(live[1], kept, live[0]), steps=(step_row(4, 1),), state=b"small"))
    ledger.close()
    ledger = new_ledger(tmp_path)
    snapshot = ledger.load()
    assert not ledger.created and snapshot is not None
    assert (snapshot.live, snapshot.kept, snapshot.steps) == (live, (kept,), (step_row(4, 1),))
    assert (snapshot.state, snapshot.branch) == (b"small", 0)
    assert snapshot.live[0].meta == meta_of(2, 1) and snapshot.live[0].checksum == TOP


def test_a_transition_rewrites_the_small_row_and_not_the_payload_facts(tmp_path):
    ledger = new_ledger(tmp_path)
    row = row_of(5)
    ledger.write(Changes(groups=(row,)))
    peek = sqlite3.connect(tmp_path / "ledger.sqlite")
    peek.execute("DELETE FROM payloads")
    peek.commit()
    ledger.write(Changes(groups=(msgspec.structs.replace(row, state="leased"),)))
    assert peek.execute("SELECT COUNT(*) FROM payloads").fetchone() == (0,)
    moved = msgspec.structs.replace(row, place=Place(1, 320, 5))
    ledger.write(Changes(groups=(moved,)))  # other facts are written
    assert peek.execute("SELECT COUNT(*) FROM payloads").fetchone() == (1,)
    peek.close()
    assert ledger.load().live == (moved,)


def test_a_group_issued_again_has_no_payload_and_the_next_attempt_has_its_own(tmp_path):
    ledger = new_ledger(tmp_path)
    ledger.write(Changes(groups=(row_of(5),)))
    again = GroupRow(ticket=5, attempt=1, state="reissue")
    ledger.write(Changes(groups=(again,)))
    assert ledger.load().live == (again,)
    second = row_of(5, attempt=1)
    ledger.write(Changes(groups=(second,)))
    assert ledger.load().live == (second,)


def test_a_transaction_is_whole_or_not_there(tmp_path):
    ledger = new_ledger(tmp_path)
    ledger.write(Changes(groups=(row_of(1),), state=b"before"))
    before = ledger.load()
    broken = msgspec.structs.replace(step_row(0, 1), step="no number")
    with pytest.raises(Exception, match="datatype mismatch"):
        ledger.write(Changes(groups=(row_of(1, "leased"), row_of(2)), steps=(broken,), state=b"after"))
    assert ledger.load() == before
    ledger.write(Changes(groups=(row_of(2),)))  # and the file goes on
    assert [row.ticket for row in ledger.load().live] == [1, 2]


def test_a_full_disk_is_said_and_nothing_is_written(tmp_path):
    ledger = new_ledger(tmp_path)
    ledger.write(Changes(groups=(row_of(1),)))
    pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull, match=r"ledger.sqlite cannot grow .*: free space on that disk"):
        ledger.write(Changes(groups=tuple(row_of(ticket) for ticket in range(500))))
    assert [row.ticket for row in ledger.load().live] == [1]


def test_forgotten_groups_keep_their_row_and_lose_their_payload(tmp_path):
    ledger = new_ledger(tmp_path)
    ledger.write(Changes(groups=(row_of(1, "trained", 0), row_of(2, "trained", 0))))
    ledger.write(Changes(forget=(1,)))
    assert [row.ticket for row in ledger.load().kept] == [2]
    view = LedgerFile.open_readonly(tmp_path / "ledger.sqlite")
    forgotten = view.row(1)
    assert (forgotten.state, forgotten.step, forgotten.place, forgotten.meta) == ("trained", 0, None, None)


def test_what_only_an_older_checkpoint_needs_is_pruned(tmp_path):
    ledger = new_ledger(tmp_path)
    # steps of two groups: step 0 trained 0, 1; step 1 trained 2, 4; step 2 trained 3, 5; ticket 6 was dropped, 7 is queued
    steps = (step_row(0, 2), step_row(1, 3, 4), step_row(2, 7))
    trained = [row_of(ticket, "trained", step) for ticket, step in ((0, 0), (1, 0), (2, 1), (4, 1), (3, 2), (5, 2))]
    dropped = GroupRow(ticket=6, attempt=0, state="dropped", reason="no_signal")
    ledger.write(Changes(groups=(*trained, dropped, row_of(7)), steps=steps))
    freed = ledger.steps_kept_from(2)  # a checkpoint with two committed steps is the oldest: its frontier has low = 3, and 4 above
    assert [row.ticket for row in freed] == [0, 1, 2, 4] and freed[0].place == trained[0].place
    snapshot = ledger.load()
    assert [row.ticket for row in snapshot.kept] == [3, 5]
    assert [row.step for row in snapshot.steps] == [1, 2]
    view = LedgerFile.open_readonly(tmp_path / "ledger.sqlite")
    assert [row.ticket for row in view.rows()] == [3, 4, 5, 6, 7]
    assert view.row(4).place is None
    assert ledger.steps_kept_from(2) == ()
    assert ledger.steps_kept_from(3) and [row.ticket for row in view.rows()] == [7]


def test_a_long_run_with_checkpoints_stays_flat(tmp_path):
    ledger, sizes = new_ledger(tmp_path), []
    for step in range(60):
        tickets = range(8 * step, 8 * step + 8)
        ledger.write(Changes(groups=tuple(row_of(ticket) for ticket in tickets)))
        trained = tuple(row_of(ticket, "trained", step) for ticket in tickets)
        ledger.write(Changes(groups=trained, steps=(step_row(step, 8 * step + 8),), state=b"s" * 500))
        ledger.steps_kept_from(max(0, step - 3))
        sizes.append(ledger._connection.execute("PRAGMA page_count").fetchone()[0])
    assert len(ledger.load().kept) == 32 and len(ledger._written) == 32  # of steps 56 to 59
    assert sizes[-1] == sizes[10]


def test_a_branch_moves_what_a_restore_gave_up_and_forgets_later_steps(tmp_path):
    ledger = new_ledger(tmp_path)
    ledger.write(Changes(groups=(row_of(0, "trained", 0), row_of(1, "trained", 1), row_of(2)), steps=(step_row(0, 1), step_row(1, 2))))
    again = row_of(1)  # its payload is queued again instead of sampled again
    branch = ledger.begin_branch(1, Changes(abandoned=(row_of(1, "trained", 1), row_of(2)), groups=(again,)))
    snapshot = ledger.load()
    assert branch == snapshot.branch == 1
    assert snapshot.live == (again,) and [row.step for row in snapshot.steps] == [0]
    view = LedgerFile.open_readonly(tmp_path / "ledger.sqlite")
    assert [(branch, row.ticket, row.state) for branch, row in view.abandoned()] == [(1, 1, "trained"), (1, 2, "queued")]
    assert view.row(2) is None
    assert ledger.begin_branch(1, Changes()) == 2


def test_the_file_of_another_run_shard_or_schema_is_refused_by_name(tmp_path):
    path = tmp_path / "ledger.sqlite"
    new_ledger(tmp_path).close()
    for other in (("run-2", 0, 1), ("run-1", 1, 2), ("run-1", 0, 2)):
        with pytest.raises(
            DataError, match=f"belongs to run 'run-1', shard 0 of 1; this is run '{other[0]}', shard {other[1]} of {other[2]}"
        ):
            LedgerFile(path, *other)
    with sqlite3.connect(path) as peek:
        peek.execute("UPDATE facts SET value = 9 WHERE key = 'schema'")
    peek.close()
    with pytest.raises(DataError, match="schema version 9; this is 1: use the version"):
        new_ledger(tmp_path)


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(DataError, match=r"is damaged .*move its folder away"):
        new_ledger(tmp_path)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(DataError, match="is no ledger of a queue"):
        new_ledger(tmp_path)
    with pytest.raises(DataError, match=r"is missing: a queue with queue\.durability=memory"):
        LedgerFile.open_readonly(tmp_path / "none.sqlite")


def damage(path, table: str) -> None:
    with sqlite3.connect(path) as peek:
        body = bytearray(peek.execute(f"SELECT body FROM {table}").fetchone()[0])
        body[len(body) // 2] ^= 1
        peek.execute(f"UPDATE {table} SET body = ?", (bytes(body),))
    peek.close()


def test_a_damaged_row_is_an_error_and_damaged_payload_facts_are_left_out(tmp_path):
    ledger = new_ledger(tmp_path)
    ledger.write(Changes(groups=(row_of(5),), steps=(step_row(0, 0),), state=b"state"))
    damage(tmp_path / "ledger.sqlite", "payloads")
    (row,) = ledger.load().live
    assert (row.state, row.meta, row.place) == ("queued", None, None)
    damage(tmp_path / "ledger.sqlite", "steps")
    with pytest.raises(DataError, match="the row of step 0 is damaged in the ledger"):
        ledger.load()
    damage(tmp_path / "ledger.sqlite", "groups")
    with pytest.raises(DataError, match="the row of ticket 5 is damaged in the ledger"):
        ledger.load()


def test_a_reader_sees_a_live_ledger_and_a_closed_one(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = new_ledger(tmp_path)
    ledger.write(Changes(groups=(row_of(0, "trained", 0), row_of(1), row_of(2)), steps=(step_row(0, 1),), state=b"s"))
    view = LedgerFile.open_readonly(path)
    assert view.counts() == {"queued": 2, "trained": 1}
    assert [row.ticket for row in view.rows("queued", limit=1)] == [1] and view.row(9) is None
    assert (view.steps(), view.state(), view.branch()) == ((step_row(0, 1),), b"s", 0)
    assert str(view.facts) == "run 'run-1', shard 0 of 1"
    ledger.write(Changes(groups=(row_of(1, "leased"),)))
    assert view.counts() == {"leased": 1, "queued": 1, "trained": 1}  # it follows
    view.close()
    ledger.close()
    assert not path.with_name("ledger.sqlite-wal").exists()
    assert LedgerFile.open_readonly(path).counts() == {"leased": 1, "queued": 1, "trained": 1}


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests/unit")
from durable_setup import new_ledger
from asyncrl.queue.durable.rows import Changes, GroupRow
ledger = new_ledger(Path(sys.argv[1]))
for ticket in range(50):
    ledger.write(Changes(groups=(GroupRow(ticket=ticket, attempt=0, state="generating"),)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_every_transaction_for_a_reader_and_for_the_next(tmp_path, request):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=request.config.rootpath, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert LedgerFile.open_readonly(tmp_path / "ledger.sqlite").counts() == {"generating": 50}
    assert len(new_ledger(tmp_path).load().live) == 50


def test_synced_waits_for_the_disk_at_each_transaction(tmp_path):
    modes = [new_ledger(tmp_path / name, synced=synced) for name, synced in (("a", False), ("b", True))]
    assert [ledger._connection.execute("PRAGMA synchronous").fetchone() for ledger in modes] == [(1,), (2,)]
    assert [ledger._connection.execute("PRAGMA journal_mode").fetchone() for ledger in modes] == [("wal",), ("wal",)]


def test_a_flipped_bit_anywhere_in_the_file_is_refused_or_costs_payload_facts_alone(tmp_path):
    ledger = new_ledger(tmp_path)
    rows = [row_of(ticket, "trained" if ticket < 8 else "queued", 0 if ticket < 8 else -1) for ticket in range(20)]
    ledger.write(Changes(groups=tuple(rows), steps=(step_row(0, 8),), state=b"state" * 20))
    good = ledger.load()
    ledger.close()
    path, seen = tmp_path / "ledger.sqlite", set()
    data, chance = path.read_bytes(), random.Random(5)
    for _ in range(400):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            ledger = new_ledger(tmp_path)
            found = ledger.load()
            ledger.close()
        except DataError:
            seen.add("refused")
            continue
        seen.add("whole" if found == good else "payload facts")
        assert (found.steps, found.state, len(found.live)) == (good.steps, good.state, 12)
        assert all(row in good.kept for row in found.kept)
        assert all(row in (was, was.without_payload()) for row, was in zip(found.live, good.live, strict=True))
    assert seen == {"refused", "whole", "payload facts"}
