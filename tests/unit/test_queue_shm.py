import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrl.errors import QueueError, SchemaError
from asyncrl.queue.arena import Arena, size_class
from asyncrl.queue.consumer import Consumer
from asyncrl.queue.messages import Committed, Frontier, Lease, PayloadItem
from asyncrl.queue.payload import checksum
from asyncrl.queue.payload_reader import PayloadReader
from asyncrl.queue.shm import Mappings, SegmentKeeper

KIB = 1 << 10


@pytest.fixture
def arena(tmp_path):
    with_room = Arena("run-1", "producer_a", 1024 * KIB, folder=tmp_path)
    yield with_room
    with_room.close(unlink=True)


def test_what_was_written_is_seen_by_another_process_and_summed_up(arena, tmp_path):
    frames = [b"abc", b"", bytes(range(256)) * 400]
    segment = arena.write(frames)
    assert segment.name == "asyncrl-run-1.q.producer_a.0" and segment.length == 3 + 102_400
    assert segment.checksum == checksum(frames)
    assert os.stat(tmp_path / segment.name).st_mode & 0o777 == 0o600
    code = (
        "import sys; from pathlib import Path; from asyncrl.queue.shm import Mappings; from asyncrl.queue.payload import checksum\n"
        f"print(checksum([Mappings('run-1', folder=Path({str(tmp_path)!r})).view({segment.name!r}, {segment.length})]))"
    )
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) == segment.checksum


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(1, 64), (65_536, 64), (65_537, 128), (64 << 20, 64 << 10), ((64 << 20) + 1, 128 << 10)]
)
def test_size_classes_are_powers_of_two(num_bytes, expected):
    assert size_class(num_bytes) == expected * KIB


def test_a_segment_is_written_again_only_after_its_group_is_settled(arena):
    first, second = arena.write([b"x" * 70_000]), arena.write([b"y" * 70_000])
    assert first.name != second.name and arena.num_used == 2
    arena.recycle([first.name, "asyncrl-run-1.q.producer_a.99"])
    third = arena.write([b"z" * 80_000])
    assert third.name == first.name
    assert arena.num_bytes == 20 * 4 * KIB + 18 * 4 * KIB  # 80,000 bytes are 20 pages, 70,000 are 18


def test_beyond_the_limit_a_write_is_refused_and_works_again_after_a_commit(arena):
    kept = [arena.write([b"x" * 256 * KIB]) for _ in range(4)]
    with pytest.raises(QueueError, match=r"limited to 1048576 bytes; 1048576 are in 4 groups"):
        arena.write([b"x"])
    arena.recycle([kept[0].name])
    assert arena.write([b"x"]).length == 1  # the free segment of another size makes room
    assert arena.num_bytes == 3 * 256 * KIB + 4 * KIB


def test_freed_sizes_do_not_add_up_beyond_the_limit():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        arena = Arena("run-1", "a", 1024 * KIB, folder=Path(folder))
        for size in (1, 100, 200, 400, 800, 100, 900, 5):
            segment = arena.write([b"x" * size * KIB])
            assert sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder)) == arena.num_bytes <= 1024 * KIB
            arena.recycle([segment.name])
        assert arena.num_used == 0
        arena.close(unlink=True)


def test_names_left_by_an_earlier_process_are_not_written_again(arena, tmp_path):
    segment = arena.write([b"old"])
    later = Arena("run-1", "producer_a", 1024 * KIB, folder=tmp_path)
    assert later.write([b"new"]).name == "asyncrl-run-1.q.producer_a.1"
    assert bytes(Mappings("run-1", folder=tmp_path).view(segment.name, 3)) == b"old"
    later.close(unlink=True)


def test_a_full_host_is_an_error_and_not_a_signal(tmp_path, monkeypatch):
    arena = Arena("run-1", "a", 1 << 30, folder=tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(QueueError, match="no room for a payload of 3 bytes"):
        arena.write([b"abc"])
    assert os.listdir(tmp_path) == [] and arena.num_bytes == 0


def test_a_mapping_is_kept_and_made_anew_for_another_file(arena, tmp_path):
    segment = arena.write([b"x" * 100])
    mappings = Mappings("run-1", folder=tmp_path)
    view = mappings.view(segment.name, 100)
    assert view.readonly and bytes(view) == b"x" * 100
    arena.recycle([segment.name])
    arena.write([b"y" * 100])
    assert bytes(mappings.view(segment.name, 100)) == b"y" * 100  # the same pages
    os.unlink(tmp_path / segment.name)
    (tmp_path / segment.name).write_bytes(b"z" * 100)
    assert bytes(mappings.view(segment.name, 100)) == b"z" * 100
    assert bytes(view) == b"y" * 100 and len(mappings) == 1


def test_the_number_of_mappings_is_bounded_and_views_outlive_them(arena, tmp_path):
    mappings = Mappings("run-1", max_mapped=2, folder=tmp_path)
    segments = [arena.write([bytes([i]) * 10]) for i in range(4)]
    views = [mappings.view(segment.name, 10) for segment in segments]
    assert len(mappings) == 2
    assert [view[0] for view in views] == [0, 1, 2, 3]


def mapped_and_removed(folder):
    return sum(str(folder) in line and "(deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_mappings_of_removed_files_are_forgotten_and_views_that_are_held_stay_valid(arena, tmp_path):
    mappings = Mappings("run-1", folder=tmp_path)
    held, dropped, replaced, kept = (arena.write([bytes([i]) * 100]) for i in range(4))
    view = mappings.view(held.name, 100)
    for segment in (dropped, replaced, kept):
        mappings.view(segment.name, 100)
    (tmp_path / "segment-00000000.log").write_bytes(b"log")
    mappings.view_file(str(tmp_path / "segment-00000000.log"), 0, 3)
    arena.close(unlink=False)  # or its own mappings would be counted
    for name in (held.name, dropped.name, replaced.name, "segment-00000000.log"):
        os.unlink(tmp_path / name)
    (tmp_path / replaced.name).write_bytes(b"z" * 100)
    assert mapped_and_removed(tmp_path) == 4
    mappings.forget_gone()
    assert len(mappings) == 1 and mapped_and_removed(tmp_path) == 1 and bytes(view) == bytes(100)
    del view
    assert mapped_and_removed(tmp_path) == 0
    assert bytes(mappings.view(kept.name, 100)) == bytes([3]) * 100 and bytes(mappings.view(replaced.name, 100)) == b"z" * 100


class NoBroker:
    """Answers a consumer with nothing."""

    frontier = Frontier(steps=0, low=0, settled_above=(), trained=0, dropped={})

    def lease(self, step, wait_s, extra=0):
        return Lease(step=step, groups=(), blocked="nothing is there")

    def commit(self, step, priorities):
        return Committed(frontier=self.frontier, status=None)

    def checkpointed(self, oldest_step):
        pass


@pytest.mark.parametrize("method", ["lease", "commit", "checkpointed"])
def test_a_consumer_holds_no_removed_file_of_the_log_beyond_its_next_word_with_the_broker(tmp_path, method):
    reader = PayloadReader("run-1")
    consumer = Consumer([NoBroker()], [1], reader)
    path = tmp_path / "segment-00000000.log"
    path.write_bytes(b"abc")
    item = PayloadItem(ticket=0, checksum=checksum([b"abc"]), lengths=(3,), file=str(path))
    assert bytes(reader.pieces(item, [])[0]) == b"abc"
    path.unlink()
    assert mapped_and_removed(tmp_path) == 1
    arguments = {"lease": (0, 0.0), "commit": (0,), "checkpointed": (0,)}
    getattr(consumer, method)(*arguments[method])
    assert mapped_and_removed(tmp_path) == 0


@pytest.mark.parametrize(
    "name",
    ["../etc/passwd", "/etc/passwd", "asyncrl-run-2.q.a.0", "asyncrl-run-1.q.a.0/../x", "asyncrl-run-1.q.a.0\n", "asyncrl-run-1.q..0", ""],
)
def test_names_of_other_files_are_refused(tmp_path, name):
    for use in (lambda: Mappings("run-1", folder=tmp_path).view(name, 1), lambda: SegmentKeeper("run-1", folder=tmp_path).unlink(name)):
        with pytest.raises(SchemaError, match="name of a segment"):
            use()


def test_what_is_no_plain_file_or_too_short_is_refused(arena, tmp_path):
    keeper, mappings = SegmentKeeper("run-1", folder=tmp_path), Mappings("run-1", folder=tmp_path)
    segment = arena.write([b"x" * 100])
    keeper.check(segment.name, 100)
    (tmp_path / "secret").write_bytes(b"s" * 100)
    os.symlink(tmp_path / "secret", tmp_path / "asyncrl-run-1.q.a.1")
    os.mkfifo(tmp_path / "asyncrl-run-1.q.a.2")
    for name, length in [(segment.name, 65_537), (segment.name, 0), (segment.name, -1)]:
        for look in (keeper.check, mappings.view):
            with pytest.raises(QueueError, match="has 65536 bytes"):
                look(name, length)
    for name in ("asyncrl-run-1.q.a.1", "asyncrl-run-1.q.a.2", "asyncrl-run-1.q.a.3"):
        for look in (keeper.check, mappings.view):
            with pytest.raises(QueueError):
                look(name, 1)


def test_a_sweep_removes_what_nobody_needs_and_nothing_of_another_run(arena, tmp_path):
    first, second = arena.write([b"a"]), arena.write([b"b"])
    other = Arena("run-10", "a", 1 << 20, folder=tmp_path).write([b"c"])
    keeper = SegmentKeeper("run-1", folder=tmp_path)
    assert keeper.sweep({second.name}) == [first.name]
    keeper.unlink(first.name)
    assert sorted(os.listdir(tmp_path)) == sorted([second.name, other.name])


@pytest.mark.parametrize(("run_id", "owner"), [("a/b", "x"), ("a", "../x"), ("a", "x.y"), ("", "x"), ("a", "")])
def test_names_that_would_leave_the_folder_are_refused(tmp_path, run_id, owner):
    with pytest.raises(QueueError):
        Arena(run_id, owner, 1 << 20, folder=tmp_path)


def test_closing_keeps_the_files_of_groups_that_are_not_settled_unless_told(tmp_path):
    arena = Arena("run-1", "a", 1 << 20, folder=tmp_path)
    settled, kept = arena.write([b"x" * 100_000]), arena.write([b"y"])
    arena.recycle([settled.name])
    arena.close(unlink=False)
    assert os.listdir(tmp_path) == [kept.name]


def test_open_files_do_not_rise_with_the_segments(tmp_path):
    arena, mappings = Arena("run-1", "generator-0", 1 << 30, folder=tmp_path), Mappings("run-1", folder=tmp_path)
    start = len(os.listdir("/proc/self/fd"))
    segments = [arena.write([bytes([n % 256]) * 100]) for n in range(300)]
    for n, segment in enumerate(segments):
        assert bytes(mappings.view(segment.name, 100)) == bytes([n % 256]) * 100
    before = len(os.listdir("/proc/self/fd"))
    assert before - start <= 2 * 128
    arena.recycle([segment.name for segment in segments])
    again = [arena.write([bytes([n % 256]) * 200]) for n in range(300)]
    assert {segment.name for segment in again} == {segment.name for segment in segments}
    for n, segment in enumerate(again):
        assert bytes(mappings.view(segment.name, 200)) == bytes([n % 256]) * 200
    assert len(os.listdir("/proc/self/fd")) <= before
    arena.close(unlink=True)
    assert not list(tmp_path.iterdir())


def test_a_free_segment_that_somebody_removed_is_replaced(tmp_path):
    arena = Arena("run-1", "generator-0", 1 << 20, folder=tmp_path)
    gone = arena.write([b"old"])
    arena.recycle([gone.name])
    (tmp_path / gone.name).unlink()
    segment = arena.write([b"new"])
    assert segment.name != gone.name and bytes(Mappings("run-1", folder=tmp_path).view(segment.name, 3)) == b"new"
    assert arena.num_bytes == 4096


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_segment_that_cannot_be_opened_is_refused_and_costs_nothing(tmp_path, monkeypatch, call):
    """It is made, given pages, and mapped: each opens a file."""
    arena, calls, real = Arena("run-1", "generator-0", 1 << 20, folder=tmp_path), iter(range(100)), os.open

    def fails_once(*arguments, **options):
        if next(calls) == call:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments, **options)

    monkeypatch.setattr(os, "open", fails_once)
    with pytest.raises(QueueError, match="Too many open files"):
        arena.write([b"one"])
    assert (arena.num_bytes, arena.num_used) == (0, 0) and not list(tmp_path.iterdir())
    segment = arena.write([b"two"])
    assert bytes(Mappings("run-1", folder=tmp_path).view(segment.name, 3)) == b"two"
