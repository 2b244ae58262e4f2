import os

import msgspec
import pytest
from durable_setup import files, flip, frontier, new_ledger, new_log, put, queued, segment_path
from queue_folder import QueueFolder

from asyncrl.errors import DataError, QueueError
from asyncrl.queue.durable.place import Damaged, Place
from asyncrl.queue.durable.recovery import recover
from asyncrl.queue.durable.rows import Changes, GroupRow, StepRow
from asyncrl.queue.journal import Journal


def test_a_killed_log_gives_back_what_is_claimed_and_cuts_the_rest(tmp_path):
    log = new_log(tmp_path)
    first, second, third = (put(log, ticket, bytes([65 + ticket]) * 100) for ticket in range(3))
    log.close()
    with segment_path(tmp_path, first[0]).open("ab") as file:
        file.write(b"torn" * 10)
    log = new_log(tmp_path)
    with pytest.raises(QueueError, match="adopt them first"):
        put(log, 3, b"x")
    assert log.adopt([second, first]) == []
    # file header 256, records of 64 + 128 bytes: the third begins at 640, the torn bytes at 832
    assert log.report == [
        "segment-00000000.log: cut behind byte 640: 1 whole records that no ledger row needs (ticket 2 attempt 0), 40 bytes of no record"
    ]
    assert [bytes(log.read(claim[0])) for claim in (first, second)] == [b"A" * 100, b"B" * 100]
    assert put(log, 4, b"goes on")[0] == Place(0, 704, 7)
    assert third[0] == Place(0, 704, 100)


def test_files_without_claims_are_removed_and_their_numbers_not_used_again(tmp_path):
    log = new_log(tmp_path, segment_bytes=500)
    claims = [put(log, ticket, b"x" * 100) for ticket in range(5)]  # one a file
    log.close()
    log = new_log(tmp_path, segment_bytes=500)
    assert log.adopt([claims[1]], kept=[claims[3]]) == []
    assert files(tmp_path) == ["segment-00000001.log", "segment-00000003.log"]
    assert put(log, 9, b"x")[0].segment == 5
    log.release(claims[3][0])
    assert files(tmp_path) == ["segment-00000001.log", "segment-00000005.log"]


def test_live_payload_is_read_through_and_kept_payload_is_measured(tmp_path):
    log = new_log(tmp_path)
    claims = [put(log, ticket, b"x" * 100) for ticket in range(4)]
    log.close()
    path = segment_path(tmp_path, claims[0][0])
    flip(path, claims[0][0].offset + 50)
    flip(path, claims[1][0].offset + 50)
    flip(path, claims[2][0].offset - 30)
    log = new_log(tmp_path)
    damaged = log.adopt([claims[0], claims[3]], kept=[claims[2], claims[1]])
    assert [(d.ticket, d.attempt, d.reason.partition(":")[0]) for d in damaged] == [
        (0, 0, "checksum differs"),
        (2, 0, "record header damaged"),
    ]


def test_a_file_that_was_never_finished_is_removed_and_said(tmp_path):
    log = new_log(tmp_path)
    put(log, 0, b"x")
    log.close()
    os.truncate(tmp_path / "log" / "segment-00000000.log", 100)
    log = new_log(tmp_path)
    assert log.adopt([]) == [] and files(tmp_path) == []
    assert log.report == ["segment-00000000.log: file header cut short: 100 of 256 bytes are there"]


def test_a_missing_segment_is_damage_of_its_groups_and_its_number_is_not_used_again(tmp_path):
    log = new_log(tmp_path, segment_bytes=500)
    claims = [put(log, ticket, b"x" * 100) for ticket in range(3)]
    log.close()
    segment_path(tmp_path, claims[2][0]).unlink()
    log = new_log(tmp_path, segment_bytes=500)
    (damaged,) = log.adopt(claims)
    assert (damaged.ticket, damaged.reason) == (2, f"segment 2 is missing in {tmp_path / 'log'}")
    assert put(log, 3, b"x" * 300)[0].segment == 3


def fill(tmp_path, **changes):
    log, ledger = new_log(tmp_path), new_ledger(tmp_path)
    claims = [put(log, ticket, bytes([65 + ticket]) * 100) for ticket in range(4)]
    rows = [queued(claims[0], "trained", 0), queued(claims[1], "leased"), queued(claims[2]), queued(claims[3])]
    rows.append(GroupRow(ticket=4, attempt=0, state="generating", producer="generator-1"))
    step = StepRow(step=0, incarnation=0, frontier=frontier(1, 1), committed_s=1.0)
    ledger.write(Changes(groups=tuple(rows), steps=(step,), state=b"s", **changes))
    log.close()
    ledger.close()
    return claims, rows


def test_an_undamaged_queue_comes_back_as_it_was(tmp_path):
    claims, rows = fill(tmp_path)
    log = new_log(tmp_path)
    found = recover(log, new_ledger(tmp_path))
    assert (found.damaged, found.report) == ((), ())
    assert found.snapshot.live == tuple(rows[1:]) and found.snapshot.kept == (rows[0],)
    assert bytes(log.read(claims[2][0])) == b"C" * 100


def test_a_fresh_queue_recovers_to_nothing(tmp_path):
    found = recover(new_log(tmp_path), new_ledger(tmp_path))
    assert (found.snapshot, found.damaged, found.report) == (None, (), ())


def test_a_group_with_a_flipped_bit_is_issued_again_and_stays_so(tmp_path):
    claims, rows = fill(tmp_path)
    flip(segment_path(tmp_path, claims[2][0]), claims[2][0].offset)
    log, ledger = new_log(tmp_path), new_ledger(tmp_path)
    found = recover(log, ledger)
    (damage,) = found.damaged
    assert (damage.ticket, damage.attempt) == (2, 0) and damage.reason.startswith("checksum differs")
    again = found.snapshot.live[1]
    assert (again.ticket, again.attempt, again.state, again.place, again.meta) == (2, 1, "reissue", None, None)
    assert again.reasons == (f"attempt 0 at generator-0: {damage.reason}",)
    assert [row for row in found.snapshot.live if row.ticket != 2] == [rows[1], rows[3], rows[4]]
    log.close()
    ledger.close()
    second = recover(new_log(tmp_path), new_ledger(tmp_path))
    assert second.damaged == () and second.snapshot == found.snapshot


def test_a_kept_group_with_damage_stays_settled_and_loses_its_payload(tmp_path):
    claims, _ = fill(tmp_path)
    flip(segment_path(tmp_path, claims[0][0]), claims[0][0].offset - 10)
    ledger = new_ledger(tmp_path)
    found = recover(new_log(tmp_path), ledger)
    assert [(d.ticket, d.reason) for d in found.damaged] == [(0, "record header damaged: its CRC-32 differs")]
    assert found.snapshot.kept == () and len(found.snapshot.live) == 4
    row = ledger.open_readonly(ledger.path).row(0)
    assert (row.state, row.step, row.place) == ("trained", 0, None)


def test_a_torn_tail_is_the_group_that_it_cuts(tmp_path):
    claims, _ = fill(tmp_path)
    os.truncate(segment_path(tmp_path, claims[3][0]), claims[3][0].offset + 60)
    log = new_log(tmp_path)
    found = recover(log, new_ledger(tmp_path))
    assert found.damaged == (Damaged(3, 0, "cut short: 60 of 100 bytes are there"),)
    assert found.report == ("segment-00000000.log: cut behind byte 832: a torn record (ticket 3 attempt 0)",)
    assert put(log, 3, b"again", attempt=1)[0] == Place(0, claims[3][0].offset, 5)


def test_payload_outside_the_log_is_asked_for(tmp_path):
    ledger = new_ledger(tmp_path)
    rows = tuple(
        msgspec.structs.replace(queued((Place(0, 0, 5), ticket, 0, 1)), place=None, segment=segment)
        for ticket, segment in enumerate(("here", "gone", ""))
    )
    ledger.write(Changes(groups=rows))
    found = recover(new_log(tmp_path), ledger, lambda row: "" if row.segment == "here" else f"{row.segment} is not in /dev/shm")
    assert [(d.ticket, d.reason) for d in found.damaged] == [
        (1, "gone is not in /dev/shm"),
        (2, "its payload's row in the ledger is damaged or was never written"),
    ]
    assert [row.state for row in found.snapshot.live] == ["queued", "reissue", "reissue"]


def test_a_log_whose_ledger_is_gone_is_refused_and_left_alone(tmp_path):
    fill(tmp_path)
    (tmp_path / "ledger.sqlite").unlink()
    for _ in range(2):  # a second start is told the same
        log = new_log(tmp_path)
        with pytest.raises(DataError, match=r"ledger.sqlite is missing beside 1 segments"):
            recover(log, new_ledger(tmp_path))
        log.close()
    assert files(tmp_path) == ["segment-00000000.log"]


def with_a_damaged_group(path):
    """A queue of two finished groups, of which the first is damaged; nobody has it open."""
    queue = QueueFolder(path, durability="written", order="uniform")
    for ticket in queue.issue(2):
        queue.finish(ticket)
    queue.commit()
    place = queue.opened.store.payload(0).place
    queue.close()
    flip(segment_path(path / "queue" / "shard-0", place), place.offset)


def test_a_damaged_group_is_inserted_no_more_until_it_was_sampled_again(tmp_path):
    with_a_damaged_group(tmp_path)
    queue = QueueFolder(tmp_path, durability="written", order="uniform")
    assert queue.gate.state().inserted == 1  # counted as 2 it would hold tickets back for samples that nobody can take
    assert queue.issue() == [0] and queue.finish(0) == "accepted"
    assert queue.gate.state().inserted == 2
    queue.close()


def test_a_start_that_ends_once_the_damage_is_written_leaves_the_next_one_the_same_count(tmp_path, monkeypatch):
    with_a_damaged_group(tmp_path)

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as start:
        start.setattr(Journal, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            QueueFolder(tmp_path, durability="written", order="uniform")
    queue = QueueFolder(tmp_path, durability="written", order="uniform")
    assert queue.gate.state().inserted == 1
    queue.close()
