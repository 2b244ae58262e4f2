"""The segment log under any interleaving of use, kills and damage, beside a model of what must be in it.

Whatever happens: an undamaged claimed record reads back bit-equal, a damaged one is named, nothing else is lost, and no file
without a claimed record stays, but for the one that is written and the spare ones allowed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.errors import DiskFull
from asyncrl.queue.durable.place import Place
from asyncrl.queue.durable.record import FILE_HEADER_BYTES, RECORD_HEADER_BYTES, aligned, payload_checksum
from asyncrl.queue.durable.segment_file import segment_numbers
from asyncrl.queue.durable.segments import SegmentLog

PLENTY = 1 << 40
SEGMENT_BYTES = 2048


class LogMachine(RuleBasedStateMachine):
    """A writer, a reader, and everything that befalls a file between two lives of the writer."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="asyncrl-log-"))
        self.claimed: dict[tuple[int, int], tuple[Place, bytes]] = {}
        self.unclaimed: list[Place] = []
        self.damaged: set[tuple[int, int]] = set()
        self.views: list[tuple[memoryview, bytes]] = []
        self.ticket = 0
        self.free = PLENTY

    @initialize(spares=st.integers(0, 2))
    def begin(self, spares: int) -> None:
        self.spares = spares
        self.log = self.open()

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.folder)

    def open(self) -> SegmentLog:
        return SegmentLog(
            self.folder,
            "run",
            3,
            segment_bytes=SEGMENT_BYTES,
            reserve_bytes=64,
            spare_segments=self.spares,
            free_bytes=lambda _: self.free,
        )

    def path(self, number: int) -> Path:
        return self.folder / f"segment-{number:08d}.log"

    # the writer

    @rule(
        size=st.one_of(st.integers(0, 200), st.integers(0, 3000)),
        attempt=st.integers(0, 3),
        cuts=st.lists(st.integers(0, 3000), max_size=4),
    )
    def append(self, size: int, attempt: int, cuts: list[int]) -> None:
        payload = (self.ticket.to_bytes(4, "little") * (size // 4 + 1))[:size]
        bounds = [0, *sorted(min(cut, size) for cut in cuts), size]
        frames = [payload[a:b] for a, b in itertools.pairwise(bounds)]
        place = self.log.append(self.ticket, attempt, frames, payload_checksum(payload))
        assert place.offset % 64 == 0 and place.length == size
        self.claimed[(self.ticket, attempt)] = (place, payload)
        self.ticket += 1

    @rule(size=st.integers(0, 3000))
    def append_on_a_full_disk(self, size: int) -> None:
        self.free, before = 64, self.log.num_bytes
        try:
            place = self.log.append(self.ticket, 0, [bytes(size)], 0)
        except DiskFull:
            assert self.log.num_bytes <= before  # spare files made way
        else:  # only into bytes that the disk has given before
            assert self.spares and self.log.num_bytes <= before
            self.free = PLENTY
            self.log.release(place)
        self.free = PLENTY

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.claimed)))
        self.log.release(self.claimed.pop(key)[0])

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def read_and_hold(self, data: st.DataObject) -> None:
        place, payload = self.claimed[data.draw(st.sampled_from(sorted(self.claimed)))]
        self.views = [*self.views[-3:], (self.log.read(place), payload)]

    @rule()
    def sync(self) -> None:
        self.log.sync()

    # between two lives; the last group commits may have reached the log and not the ledger

    @rule(lost=st.integers(0, 3))
    def restart(self, lost: int) -> None:
        self.kill(lost)
        self.adopt()

    @rule(lost=st.integers(0, 2), junk=st.binary(min_size=1, max_size=300))
    def restart_with_a_torn_tail(self, lost: int, junk: bytes) -> None:
        self.kill(lost)
        numbers = segment_numbers(self.folder)
        if numbers:
            with self.path(numbers[-1]).open("ab") as file:
                file.write(junk)
        self.adopt()

    @rule(share=st.floats(0, 1))
    def restart_with_a_file_cut_short(self, share: float) -> None:
        self.kill(0)
        numbers = segment_numbers(self.folder)
        if numbers:
            path = self.path(numbers[-1])
            size = int(share * path.stat().st_size)
            os.truncate(path, size)
            # an empty payload needs its header alone; padding is nobody's
            self.damaged |= {key for key, (place, _) in self.claimed.items() if place.segment == numbers[-1] and place.end > size}
        self.adopt()

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), bit=st.integers(0, 7))
    def restart_with_a_flipped_bit(self, data: st.DataObject, bit: int) -> None:
        self.kill(0)
        for key in data.draw(st.lists(st.sampled_from(sorted(self.claimed)), min_size=1, max_size=3, unique=True)):
            place, _ = self.claimed[key]
            position = data.draw(st.integers(place.offset - RECORD_HEADER_BYTES, place.offset + aligned(place.length) - 1))
            self.flip(place.segment, position, bit)
            if position < place.end:
                self.damaged.add(key)
        self.adopt()

    @rule(data=st.data(), bit=st.integers(0, 7))
    def restart_with_a_flipped_bit_in_a_file_header(self, data: st.DataObject, bit: int) -> None:
        self.kill(0)
        numbers = segment_numbers(self.folder)
        if numbers:
            self.flip(data.draw(st.sampled_from(numbers)), data.draw(st.integers(0, FILE_HEADER_BYTES - 1)), bit)
        self.adopt()

    @rule(data=st.data())
    def restart_without_a_file(self, data: st.DataObject) -> None:
        self.kill(0)
        numbers = segment_numbers(self.folder)
        if numbers:
            number = data.draw(st.sampled_from(numbers))
            self.path(number).unlink()
            self.damaged |= {key for key, (place, _) in self.claimed.items() if place.segment == number}
        self.adopt()

    def kill(self, lost: int) -> None:
        self.views.clear()
        self.log.close()
        for key in sorted(self.claimed)[len(self.claimed) - lost :] if lost else []:
            del self.claimed[key]

    def flip(self, number: int, position: int, bit: int) -> None:
        data = bytearray(self.path(number).read_bytes())
        data[position] ^= 1 << bit
        self.path(number).write_bytes(data)

    def adopt(self) -> None:
        self.log = self.open()
        claims = [(place, *key, payload_checksum(payload)) for key, (place, payload) in self.claimed.items()]
        found = self.log.adopt(claims)
        assert {(entry.ticket, entry.attempt) for entry in found} == self.damaged
        assert len(found) == len(self.damaged) and all(entry.reason for entry in found)
        for key in self.damaged:
            del self.claimed[key]
        self.damaged = set()

    # what must hold

    @invariant()
    def every_claimed_record_reads_back_bit_equal(self) -> None:
        for (ticket, attempt), (place, payload) in self.claimed.items():
            assert self.log.check(place, ticket, attempt, payload_checksum(payload)) == ""
            assert self.log.read(place) == payload

    @invariant()
    def held_views_do_not_change(self) -> None:
        assert all(view == payload for view, payload in self.views)

    @invariant()
    def no_file_stays_without_a_claim_but_the_one_that_is_written(self) -> None:
        claimed, there = {place.segment for place, _ in self.claimed.values()}, segment_numbers(self.folder)
        assert claimed <= set(there) and set(there) - claimed <= set(there[-1:])
        assert self.log.num_segments == len(there)
        spares = list(self.folder.glob("spare-*"))
        assert len(spares) <= self.spares
        assert self.log.num_bytes == sum(path.stat().st_size for path in [*map(self.path, there), *spares])

    @invariant()
    def places_do_not_overlap(self) -> None:
        spans = sorted((p.segment, p.offset - RECORD_HEADER_BYTES, p.offset + aligned(p.length)) for p, _ in self.claimed.values())
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
