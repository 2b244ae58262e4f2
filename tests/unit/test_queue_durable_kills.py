"""kill -9 at each point of a group commit: what was acknowledged is there, what was not is whole or gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
from durable_setup import PLENTY, new_ledger, new_log, put, queued

from asyncrl.queue.durable.recovery import recover
from asyncrl.queue.durable.rows import Changes

BURSTS, GROUPS = 8, 2


def payload_of(ticket: int) -> bytes:
    return bytes([65 + ticket]) * (200 + ticket)


class Fuse:
    """Kills this process at the n-th write to the log or statement of the ledger; a log write is left half done."""

    def __init__(self, blows_at: int) -> None:
        self.left = blows_at
        self.pwritev = os.pwritev

    def burn(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, fd: int, buffers: list[memoryview], position: int) -> int:
        if self.left == 0:
            self.pwritev(fd, [buffers[0], *(buffer[: buffer.nbytes // 2] for buffer in buffers[1:])], position)
        self.burn()
        return self.pwritev(fd, buffers, position)


def work(folder: Path, fuse: Fuse, acknowledged: int) -> None:
    """Bursts of two groups; the groups of the burst before the last are trained and freed, so that files are written anew."""
    log, ledger = new_log(folder, segment_bytes=1000, spare_segments=1), new_ledger(folder)
    log.adopt(())
    os.pwritev = fuse.write
    ledger._connection.set_trace_callback(lambda statement: fuse.burn())
    rows = []
    for burst in range(BURSTS):
        for ticket in range(burst * GROUPS, (burst + 1) * GROUPS):
            rows.append(queued(put(log, ticket, payload_of(ticket))))
        log.sync()
        freed = [row.without_payload(state="trained", step=0) for row in rows[:-4]]
        ledger.write(Changes(groups=(*rows[-2:], *freed)))
        for row in rows[:-4]:
            log.release(row.place)
        rows = rows[-4:]
        os.write(acknowledged, bytes([burst]))


def killed_at(folder: Path, point: int) -> tuple[int, bytes]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(folder, Fuse(point), writer)
        finally:
            os._exit(0 if point > 1000 else 3)
    os.close(writer)
    said = b""
    while part := os.read(reader, 100):
        said += part
    os.close(reader)
    return os.waitpid(child, 0)[1], said


def check(folder: Path, bursts_acknowledged: int) -> None:
    log, ledger = new_log(folder, segment_bytes=1000, free_bytes=lambda _: PLENTY), new_ledger(folder)
    found = recover(log, ledger)
    assert found.damaged == ()
    live = found.snapshot.live if found.snapshot else ()
    count = ledger.open_readonly(ledger.path).counts()
    bursts = sum(count.values()) / GROUPS
    assert bursts in (bursts_acknowledged, bursts_acknowledged + 1)  # the next one may have been committed and not said
    assert count.get("trained", 0) == max(0, bursts - 2) * GROUPS
    assert [row.ticket for row in live] == list(range(count.get("trained", 0), int(bursts) * GROUPS))
    assert all(log.read(row.place) == payload_of(row.ticket) for row in live)
    again = queued(put(log, 90, b"goes on"))
    ledger.write(Changes(groups=(again, *(msgspec.structs.replace(row, state="leased") for row in live))))
    assert len(ledger.load().live) == len(live) + 1
    log.close()
    ledger.close()


@pytest.mark.parametrize("point", range(0, 80, 4))
def test_kill_9_within_a_group_commit_loses_nothing_acknowledged(tmp_path, point):
    for offset in range(4):
        folder = tmp_path / str(offset)
        status, said = killed_at(folder, point + offset)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"point {point + offset} is beyond the work"
        assert said == bytes(range(len(said)))
        check(folder, len(said))


def test_work_that_nobody_kills_ends_with_everything_acknowledged(tmp_path):
    status, said = killed_at(tmp_path, 10_000)
    assert (status, len(said)) == (0, BURSTS)
    check(tmp_path, BURSTS)
