import contextlib
import errno
import os
import pickle  # as Ray carries an error from a process to the driver

import numpy as np
import pyarrow as pa
import pytest
from durable_setup import PLENTY, files, flip, new_log, put, segment_path

from asyncrl.errors import DataError, DiskFull, QueueError
from asyncrl.queue.durable.place import Place
from asyncrl.queue.durable.record import FileHeader, RecordHeader, payload_checksum
from asyncrl.queue.durable.segment_file import SegmentFile
from asyncrl.queue.durable.segments import SegmentLog


def test_a_payload_reads_back_as_the_frames_joined_at_a_multiple_of_64(tmp_path):
    log = new_log(tmp_path)
    first, second = put(log, 7, b"abcde"), put(log, 8, b"x" * 100)
    # 256 bytes of file header, 64 of record header; the second record starts 64 behind the first payload's start
    assert first[0] == Place(0, 320, 5) and second[0] == Place(0, 448, 100)
    assert bytes(log.read(first[0])) == b"abcde" and bytes(log.read(second[0])) == b"x" * 100
    assert log.num_bytes == 448 + 128 == (tmp_path / "log" / "segment-00000000.log").stat().st_size


def test_a_read_is_read_only_and_grows_with_the_file(tmp_path):
    log = new_log(tmp_path)
    first = log.read(put(log, 0, b"abc")[0])
    assert first.readonly
    assert bytes(log.read(put(log, 1, b"defg" * 5000)[0])) == b"defg" * 5000
    assert bytes(first) == b"abc"


def test_frames_of_any_buffer_type_and_none_at_all_are_written(tmp_path):
    log = new_log(tmp_path)
    frames = [pa.py_buffer(b"ab"), bytearray(b""), memoryview(b"cd"), *[b"e"] * 3000]
    place = log.append(0, 0, frames, 0)
    assert bytes(log.read(place)) == b"abcd" + b"e" * 3000
    empty = put(log, 1, b"")
    assert bytes(log.read(empty[0])) == b"" and log.check(*empty) == ""


def test_an_arrow_stream_opens_as_it_lies_in_the_log(tmp_path):
    batch = pa.record_batch({"x": pa.array([1, 2, 3], pa.int32())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    log = new_log(tmp_path)
    place = log.append(0, 0, [sink.getvalue()], 0)
    assert pa.ipc.open_stream(log.read(place)).read_all()["x"].to_pylist() == [1, 2, 3]


def test_a_short_write_goes_on_where_it_stopped(tmp_path, monkeypatch):
    real, calls = os.pwritev, []

    def short(fd, buffers, position):
        calls.append(position)
        return real(fd, [buffers[0][:7]], position)

    log = new_log(tmp_path)
    monkeypatch.setattr(os, "pwritev", short)
    claim = put(log, 3, bytes(range(200)))
    monkeypatch.undo()
    assert len(calls) > 40
    assert log.check(*claim) == "" and bytes(log.read(claim[0])) == bytes(range(200))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path):
    free = [1000]
    log = new_log(tmp_path, reserve_bytes=500, free_bytes=lambda _: free[0])
    put(log, 0, b"x" * 64)
    size = log.num_bytes
    with pytest.raises(DiskFull, match=r"1000 bytes free, of which 500 stay in reserve; a group needs 576") as caught:
        put(log, 1, b"x" * 512)
    assert (caught.value.free_bytes, caught.value.needed_bytes) == (1000, 576) and isinstance(caught.value, OSError)
    assert log.num_bytes == size
    free[0] = 5000
    assert bytes(log.read(put(log, 1, b"x" * 512)[0])) == b"x" * 512


def test_a_disk_that_fills_up_in_mid_record_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    real, calls = os.pwritev, []

    def filling(fd, buffers, position):
        calls.append(position)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, [buffers[0][:9]], position)

    log = new_log(tmp_path)
    first = put(log, 0, b"kept")
    before = segment_path(tmp_path, first[0]).read_bytes()
    monkeypatch.setattr(os, "pwritev", filling)
    with pytest.raises(DiskFull, match="No space left on device"):
        put(log, 1, b"x" * 500)
    monkeypatch.undo()
    assert len(calls) == 3 and segment_path(tmp_path, first[0]).read_bytes() == before
    assert bytes(log.read(put(log, 1, b"later")[0])) == b"later" and log.check(*first) == ""


def test_a_disk_that_is_full_for_a_new_file_leaves_none(tmp_path, monkeypatch):
    def full(fd, buffers, position):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = new_log(tmp_path)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskFull):
        put(log, 0, b"x")
    monkeypatch.undo()
    assert files(tmp_path) == [] and log.num_segments == 0
    assert log.check(*put(log, 0, b"x")) == ""


def test_another_failure_of_the_disk_is_not_called_full(tmp_path, monkeypatch):
    def broken(fd, buffers, position):
        raise OSError(errno.EIO, "Input/output error")

    log = new_log(tmp_path)
    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(QueueError, match="Input/output error; mend the disk"):
        put(log, 0, b"x")


def test_a_file_goes_when_it_is_sealed_and_nothing_in_it_is_live(tmp_path):
    log = new_log(tmp_path, segment_bytes=1000)
    claims = [put(log, ticket, bytes([ticket]) * 300) for ticket in range(6)]  # a record takes 384 bytes: one a file
    assert [claim[0].segment for claim in claims] == [0, 1, 2, 3, 4, 5]
    log.release(claims[1][0])
    assert files(tmp_path) == [f"segment-0000000{n}.log" for n in (0, 2, 3, 4, 5)] and log.num_segments == 5
    log.release(claims[5][0])  # the one that is written stays
    assert log.num_segments == 5
    put(log, 6, b"z" * 300)  # it is full, and goes now
    assert files(tmp_path) == [f"segment-0000000{n}.log" for n in (0, 2, 3, 4, 6)]
    assert bytes(log.read(claims[0][0])) == bytes([0]) * 300
    with pytest.raises(QueueError, match="has no segment 1"):
        log.read(claims[1][0])


def test_a_record_larger_than_a_segment_gets_a_file_of_its_own(tmp_path):
    log = new_log(tmp_path, segment_bytes=1000)
    claims = [put(log, 0, b"a" * 10), put(log, 1, b"b" * 5000), put(log, 2, b"c" * 10)]
    assert [claim[0].segment for claim in claims] == [0, 1, 2]
    assert [log.check(*claim) for claim in claims] == ["", "", ""]


def test_a_view_outlives_the_release_of_its_file(tmp_path):
    log = new_log(tmp_path, segment_bytes=600)
    claim = put(log, 0, b"abc" * 100)
    view = log.read(claim[0])
    put(log, 1, b"x" * 300)
    log.release(claim[0])
    log.release(claim[0])  # once more changes nothing
    assert files(tmp_path) == ["segment-00000001.log"] and bytes(view) == b"abc" * 100


def test_sync_touches_the_disk_only_for_what_was_appended(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append("data"))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append("folder"))
    log = new_log(tmp_path, segment_bytes=720)
    log.sync()
    assert synced == []
    put(log, 0, b"x" * 300)
    put(log, 1, b"x" * 300)  # in a second file: the sealed one is synced too
    log.sync()
    assert synced == ["data", "data", "folder", "folder"]  # the folder, and that which holds it
    log.sync()
    assert len(synced) == 4
    put(log, 2, b"")
    log.sync()
    assert synced[4:] == ["data"]


def test_after_a_failed_sync_the_log_takes_nothing_more(tmp_path, monkeypatch):
    def broken(fd):
        raise OSError(errno.EIO, "Input/output error")

    log = new_log(tmp_path)
    put(log, 0, b"x")
    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(QueueError, match="could not be made durable"):
        log.sync()
    monkeypatch.undo()
    with pytest.raises(QueueError, match="could not be made durable"):
        log.sync()
    with pytest.raises(QueueError, match="could not be made durable"):
        put(log, 1, b"x")


@pytest.mark.parametrize("position", [0, 8, 12, 20, 30, 39, 45, 55, 60, 63])
def test_a_flipped_bit_anywhere_in_a_record_header_is_found(tmp_path, position):
    log = new_log(tmp_path)
    claim = put(log, 5, b"payload")
    flip(segment_path(tmp_path, claim[0]), 256 + position)
    assert log.check(*claim) == "record header damaged: its CRC-32 differs"


def test_check_says_what_is_wrong(tmp_path):
    log = new_log(tmp_path)
    place, ticket, attempt, checksum = claim = put(log, 5, b"p" * 1000)
    path = segment_path(tmp_path, place)
    assert log.check(*claim) == ""
    assert log.check(place, ticket, attempt + 1, checksum).startswith("header damaged: the ledger says")
    assert log.check(place, ticket + 1, attempt, checksum).startswith("header damaged: the ledger says")
    assert log.check(place, ticket, attempt, checksum + 1).startswith("header damaged: the ledger says")
    assert log.check(Place(3, 320, 7), 5, 0, 0).startswith("segment 3 is missing")
    flip(path, place.end - 1)
    assert log.check(*claim).startswith(f"checksum differs: xxh3-64 was {checksum:#018x} and is ")
    assert log.check(*claim, payload=False) == ""
    os.truncate(path, place.offset + 600)
    assert log.check(*claim) == "cut short: 600 of 1000 bytes are there"
    os.truncate(path, place.offset - 14)
    assert log.check(*claim) == "record header cut short: 50 of 64 bytes are there"


def test_a_header_that_was_written_to_another_place_is_not_believed(tmp_path):
    log = new_log(tmp_path)
    first, second = put(log, 5, b"a" * 64), put(log, 5, b"a" * 64)
    path = segment_path(tmp_path, first[0])
    data = bytearray(path.read_bytes())
    data[second[0].offset - 64 : second[0].end] = data[first[0].offset - 64 : first[0].end]
    path.write_bytes(data)
    assert log.check(*first) == "" and log.check(*second).startswith("header damaged: the ledger says")


def test_headers_of_another_kind_format_or_length_are_refused():
    record = RecordHeader(ticket=1, attempt=2, segment=3, offset=320, length=5, checksum=(1 << 64) - 1)
    assert RecordHeader.parse(record.pack()) == record and len(record.pack()) == 64
    header = FileHeader(run_id="läuft", shard=2, number=9)
    assert FileHeader.parse(header.pack()) == header and len(header.pack()) == 256
    with pytest.raises(DataError, match="record header cut short: 63 of 64"):
        RecordHeader.parse(record.pack()[:63])
    with pytest.raises(DataError, match="a run id has at most 192 bytes; met 193"):
        FileHeader(run_id="x" * 193, shard=0, number=0).pack()


def test_a_second_writer_and_the_folder_of_another_run_are_refused(tmp_path):
    log = new_log(tmp_path)
    put(log, 0, b"x")
    with pytest.raises(QueueError, match="still there: end it first"):
        new_log(tmp_path)
    log.close()
    with pytest.raises(DataError, match="belongs to run 'run-1', shard 0; this is run 'run-2', shard 1"):
        SegmentLog(tmp_path / "log", "run-2", 1)
    new_log(tmp_path).close()  # the refused one holds no lock


def test_another_process_reads_and_checks_a_file_without_the_lock(tmp_path):
    log = new_log(tmp_path)
    claim = put(log, 4, b"seen from outside")
    file = SegmentFile.open(tmp_path / "log", 0)
    assert file.header() == FileHeader(run_id="run-1", shard=0, number=0)
    assert file.check(*claim) == "" and bytes(file.view(claim[0])) == b"seen from outside"
    assert payload_checksum(file.view(claim[0])) == claim[3]
    file.close()
    with pytest.raises(DataError, match=r"segment-00000009\.log is missing"):
        SegmentFile.open(tmp_path / "log", 9)


def test_a_released_file_is_written_anew_and_its_old_records_are_not_believed(tmp_path):
    log = new_log(tmp_path, segment_bytes=700, spare_segments=1)
    claims = [put(log, ticket, bytes([ticket]) * 300) for ticket in range(3)]  # one a file, of 640 bytes
    inode = segment_path(tmp_path, claims[0][0]).stat().st_ino
    log.release(claims[0][0])
    log.release(claims[1][0])  # one spare file is kept, this one goes
    assert sorted(os.listdir(tmp_path / "log")) == ["lock", "segment-00000002.log", "spare-00000000.log"]
    assert (log.num_segments, log.num_bytes) == (1, 1280)
    again = put(log, 3, b"short")
    assert segment_path(tmp_path, again[0]).stat().st_ino == inode
    assert again[0] == Place(3, 320, 5) and log.num_bytes == 1280
    put(log, 4, b"x" * 64)  # goes into the same file
    assert bytes(log.read(again[0])) == b"short" and log.check(*again) == ""
    old = Place(3, claims[0][0].offset, 300)
    assert log.check(old, 0, 0, claims[0][3]).startswith("header damaged: the ledger says")
    log.close()
    log = new_log(tmp_path, segment_bytes=700, spare_segments=1)
    assert log.adopt([claims[2], again]) == []
    assert log.report == ["segment-00000003.log: cut behind byte 384: 1 whole records that no ledger row needs (ticket 4 attempt 0)"]
    assert files(tmp_path) == ["segment-00000002.log", "segment-00000003.log"]


def test_a_file_with_a_view_in_use_is_not_written_anew(tmp_path):
    log = new_log(tmp_path, segment_bytes=700, spare_segments=4)
    first, second, _ = (put(log, ticket, bytes([ticket]) * 300) for ticket in range(3))
    view = np.frombuffer(log.read(first[0]), np.uint8)
    log.read(second[0])  # dropped at once
    log.release(first[0])
    log.release(second[0])
    assert sorted(path.name for path in (tmp_path / "log").glob("spare*")) == ["spare-00000001.log"]
    put(log, 3, b"z" * 300)
    assert (view == 0).all() and len(view) == 300


def test_on_a_full_disk_a_spare_file_can_be_written_and_no_new_one_is_kept(tmp_path):
    free = [PLENTY]
    log = new_log(tmp_path, segment_bytes=700, spare_segments=4, free_bytes=lambda _: free[0])
    claims = [put(log, ticket, bytes([ticket]) * 300) for ticket in range(3)]
    log.release(claims[0][0])
    free[0] = 100  # below the reserve
    log.release(claims[1][0])
    assert sorted(os.listdir(tmp_path / "log")) == ["lock", "segment-00000002.log", "spare-00000000.log"]
    again = put(log, 3, b"y" * 300)
    assert log.check(*again) == ""
    with pytest.raises(DiskFull):
        put(log, 4, b"y" * 300)


class SmallDisk:
    """Tells the bytes that a log's files leave of a disk."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes

    def __call__(self, folder):
        return self.num_bytes - sum(path.stat().st_size for path in folder.glob("*.log"))


def filled(tmp_path, disk, *, size=300, **more):
    """A log whose disk was filled with records of ``size`` bytes, all released."""
    log = new_log(tmp_path, **{"segment_bytes": 700, "spare_segments": 4, "reserve_bytes": 0, "free_bytes": disk, **more})
    claims = []
    with contextlib.suppress(DiskFull):
        while True:
            claims.append(put(log, len(claims), b"x" * size))
    for claim in claims:
        log.release(claim[0])
    return log


def test_spare_files_make_way_for_a_record_that_the_disk_has_no_room_for(tmp_path):
    log = filled(tmp_path, SmallDisk(3500))  # five files of 640 bytes, the active one dead as well
    assert len(list((tmp_path / "log").glob("spare*"))) == 4
    large = put(log, 9, b"y" * 2500)
    assert log.check(*large) == "" and log.num_bytes == 2880 and files(tmp_path) == ["segment-00000005.log"]
    with pytest.raises(DiskFull):
        put(log, 10, b"z" * 1000)
    log.release(large[0])
    assert log.check(*put(log, 11, b"z" * 1000)) == "", "an active file without live payload holds no space either"


def test_what_append_would_take_is_not_refused_and_what_is_refused_leaves_no_dead_file(tmp_path):
    disk = SmallDisk(3500)
    log = filled(tmp_path, disk)
    disk.num_bytes = 0  # somebody else took what was left
    log.check_room(300)
    assert log.check(*put(log, 9, b"y" * 300)) == ""
    with pytest.raises(DiskFull):
        log.check_room(2500)
    assert list((tmp_path / "log").glob("spare*")) == [] and len(files(tmp_path)) == 1
    disk.num_bytes = 640 + 3000
    log.check_room(2500)
    assert log.check(*put(log, 10, b"y" * 2500)) == ""


def test_a_spare_file_that_holds_the_record_is_written_before_files_make_way(tmp_path):
    disk = SmallDisk(PLENTY)
    log = new_log(tmp_path, segment_bytes=1000, spare_segments=4, reserve_bytes=0, free_bytes=disk)
    spare, small, live = (put(log, ticket, b"x" * size) for ticket, size in ((0, 600), (1, 500), (2, 300)))
    log.release(spare[0])
    log.release(small[0])
    disk.num_bytes = log.num_bytes
    log.check_room(640)  # fits no rest of the active file, nor the file released last: 64 bytes are missing there
    again = put(log, 3, b"y" * 580)
    assert log.check(*again) == "" == log.check(*live) and log.num_bytes <= disk.num_bytes


def test_files_that_can_go_make_way_where_a_quota_says_full(tmp_path, monkeypatch):
    def over(fd, buffers, position):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    log = filled(tmp_path, disk := SmallDisk(3500))
    disk.num_bytes = PLENTY
    monkeypatch.setattr(os, "pwritev", over)
    with pytest.raises(DiskFull):
        put(log, 9, b"y" * 300)
    assert log.num_bytes == 0 and log.num_segments == 0
    monkeypatch.undo()
    assert log.check(*put(log, 9, b"y" * 300)) == ""


def test_files_larger_than_a_segment_are_written_anew_within_the_bytes_that_spares_may_have(tmp_path):
    log = new_log(tmp_path, segment_bytes=700, spare_segments=4, spare_bytes=4000)
    claims = [put(log, ticket, bytes([ticket]) * 1500) for ticket in range(4)]
    for claim in claims[:3]:
        log.release(claim[0])
    assert len(list((tmp_path / "log").glob("spare*"))) == 2  # a third one would make 5,520 bytes
    before = log.num_bytes
    again = put(log, 4, b"y" * 1500)
    assert log.check(*again) == "" and log.num_bytes == before


def test_handles_files_and_bytes_stay_flat_while_payload_comes_and_goes(tmp_path):
    log, live, seen = new_log(tmp_path, segment_bytes=4096, spare_segments=2), [], []
    for ticket in range(600):
        live.append(put(log, ticket, bytes(1000)))
        log.read(live[0][0])
        if len(live) > 8:
            log.release(live.pop(0)[0])
        seen.append((len(os.listdir("/proc/self/fd")), log.num_segments, log.num_bytes))
    assert live[-1][0].segment > 190  # three records a file
    assert [max(column) for column in zip(*seen[300:], strict=True)] == [max(column) for column in zip(*seen[50:300], strict=True)]


def test_only_the_files_read_last_stay_open_and_others_are_opened_again(tmp_path):
    def opened():
        handles = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
        names = [os.readlink(handle) for handle in handles if os.path.lexists(handle)]
        return sorted(int(name[-12:-4]) for name in names if name.startswith(str(tmp_path / "log" / "segment-")))

    log = new_log(tmp_path, segment_bytes=600, max_mapped=3)
    claims = [put(log, ticket, bytes([ticket]) * 300) for ticket in range(8)]  # one a file; the last one is open for writing
    seen = []
    for number in (0, 1, 2, 3, 1, 4):
        assert bytes(log.read(claims[number][0])) == bytes([number]) * 300
        seen.append(opened())
    assert seen == [[0, 7], [0, 1, 7], [0, 1, 2, 7], [1, 2, 3, 7], [1, 2, 3, 7], [1, 3, 4, 7]]
    view = log.read(claims[0][0])
    for number in (1, 2, 3):
        log.read(claims[number][0])
    assert opened() == [0, 1, 2, 3, 7] and bytes(view) == bytes(300)
    del view
    assert opened() == [1, 2, 3, 7]
    log.release(claims[2][0])
    assert opened() == [1, 3, 7] and bytes(log.read(claims[0][0])) == bytes(300)


def test_a_file_that_was_deleted_while_it_was_closed_is_a_lost_payload_and_can_be_released(tmp_path):
    log = new_log(tmp_path, segment_bytes=600, max_mapped=1, spare_segments=4)
    claims = [put(log, ticket, bytes([ticket]) * 300) for ticket in range(4)]
    for claim in claims[:3]:
        log.read(claim[0])
    segment_path(tmp_path, claims[0][0]).unlink()
    os.truncate(segment_path(tmp_path, claims[1][0]), 300)
    for claim, reason in zip(claims[:2], ("No such file or directory", "greater than file size"), strict=True):
        with pytest.raises(QueueError, match=f"the payload at .* is lost: .* cannot be read: .*{reason}"):
            log.read(claim[0])
        log.release(claim[0])
    assert log.num_segments == 2 and bytes(log.read(claims[2][0])) == bytes([2]) * 300


def test_a_full_disk_survives_pickle_with_its_numbers():
    error = pickle.loads(pickle.dumps(DiskFull("no room", folder="/x", free_bytes=1)))
    assert (str(error), error.folder, error.free_bytes) == ("no room", "/x", 1)


def test_what_an_earlier_segment_left_in_a_file_is_not_reported_as_a_record(tmp_path):
    log = new_log(tmp_path, segment_bytes=520, spare_segments=1)
    old = [put(log, ticket, b"o" * 64) for ticket in range(3)]  # two records of 128 bytes a file
    log.release(old[0][0])
    log.release(old[1][0])
    claims = [put(log, ticket, b"n" * 64) for ticket in (3, 4)]
    assert claims[1][0] == Place(2, 320, 64)  # where ticket 0 lay; ticket 1 still lies behind it
    assert b"o" * 64 in segment_path(tmp_path, claims[1][0]).read_bytes()
    log.close()
    log = new_log(tmp_path)
    assert log.adopt([old[2], *claims]) == [] and log.report == []
