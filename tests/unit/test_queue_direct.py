import os
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from asyncrl.errors import ConfigError, QueueError, SchemaError
from asyncrl.queue import direct
from asyncrl.queue.direct import FRAME_BYTES, Shelf
from asyncrl.queue.keys import make_keys
from asyncrl.queue.messages import PROTOCOL_VERSION, PayloadItem, Payloads, Pull
from asyncrl.queue.payload import checksum
from asyncrl.queue.payload_reader import PayloadReader
from asyncrl.queue.puller import Puller

RUN = "run-1"


@pytest.fixture
def shelf(tmp_path):
    one = Shelf(RUN, "generator-0", f"ipc://{tmp_path}/q", 64 << 20)
    yield one
    one.close(unlink=True)


@pytest.fixture
def puller():
    one = Puller(RUN, "learner-0", 1.0, 32 << 20)
    yield one
    one.close()


def item(shelf, segment, **changes):
    known = {"ticket": 0, "checksum": segment.checksum, "lengths": (segment.length,), "segment": segment.name, "source": shelf.source}
    return PayloadItem(**{**known, **changes})


@pytest.mark.parametrize("broker", ["ipc", "tcp"])
def test_frames_come_as_they_were_kept_and_long_ones_in_pieces(tmp_path, puller, broker):
    shelf = Shelf(RUN, "generator-0", f"ipc://{tmp_path}/q" if broker == "ipc" else "tcp://127.0.0.1:5555", 64 << 20)
    frames = [b"abc", np.arange(FRAME_BYTES // 8 + 1)]
    segment = shelf.write(frames)
    pieces = puller.pull(item(shelf, segment))
    assert [len(piece) for piece in pieces] == [3, FRAME_BYTES, 8]
    assert checksum(pieces) == segment.checksum == checksum(frames)
    assert shelf.source.startswith(f"{broker}://")
    shelf.close(unlink=True)


def test_what_is_settled_is_kept_no_more_and_makes_room(shelf, puller):
    first, second = (shelf.write([bytes(30 << 20)]) for _ in range(2))
    with pytest.raises(QueueError, match=r"limited to 67108864 bytes; 62914560 are in 2 groups"):
        shelf.write([bytes(30 << 20)])
    shelf.recycle([first.name, "asyncrl-run-1.q.generator-0.99"])
    assert shelf.num_used == 1 and shelf.num_bytes == 30 << 20
    shelf.write([bytes(30 << 20)])
    with pytest.raises(QueueError, match="keeps no payload"):
        puller.pull(item(shelf, first))
    assert len(puller.pull(item(shelf, second))) == 2


def test_what_an_earlier_life_kept_has_other_names(shelf, tmp_path):
    later = Shelf(RUN, "generator-0", f"ipc://{tmp_path}/q", 1 << 20)
    first, second = shelf.write([b"abc"]), later.write([b"abc"])
    later.recycle([first.name])
    assert later.num_used == 1 and first.name != second.name
    later.close(unlink=True)


def test_a_dead_producer_is_waited_for_once_and_the_others_are_not_hurt(shelf, tmp_path):
    puller = Puller(RUN, "learner-0", 0.4, 32 << 20)
    dead = Shelf(RUN, "generator-1", f"ipc://{tmp_path}/q", 1 << 20)
    lost = dead.write([b"lost"])
    dead.close(unlink=True)
    started_s = time.monotonic()
    with pytest.raises(QueueError, match=r"did not answer within 0.4 s"):
        puller.pull(item(dead, lost))
    assert 0.4 <= time.monotonic() - started_s < 2.0
    with pytest.raises(QueueError, match="has just not answered"):
        puller.pull(item(dead, lost))
    assert puller.pull(item(shelf, shelf.write([b"alive"]))) == [b"alive"]
    puller.begin()
    with pytest.raises(QueueError, match="did not answer"):  # asked again for the next answer of the broker
        puller.pull(item(dead, lost))
    puller.close()


def test_a_payload_that_takes_long_is_asked_for_once(shelf, puller, monkeypatch):
    asked = []

    def slowly(self, identity, *frames, answer=Shelf._answer):
        asked.append(frames)
        time.sleep(0.8)
        answer(self, identity, *frames)

    monkeypatch.setattr(Shelf, "_answer", slowly)
    assert puller.pull(item(shelf, shelf.write([b"slow"]))) == [b"slow"]
    time.sleep(0.3)
    assert len(asked) == 1


def test_frames_are_no_longer_than_consumers_take(tmp_path):
    shelf = Shelf(RUN, "generator-0", f"ipc://{tmp_path}/q", 64 << 20, max_frame_bytes=1 << 20)
    puller = Puller(RUN, "learner-0", 2.0, 1 << 20)
    assert [len(piece) for piece in puller.pull(item(shelf, shelf.write([bytes(5 << 19)])))] == [1 << 20, 1 << 20, 1 << 19]
    puller.close()
    shelf.close(unlink=True)


def test_a_producer_whose_name_cannot_be_in_a_segment_s_name_is_refused_at_once(tmp_path):
    with pytest.raises(QueueError, match=r"letters, digits, _ and -; met 'host1\.gen-0'"):
        Shelf(RUN, "host1.gen-0", f"ipc://{tmp_path}/q", 1 << 20)


def test_a_consumer_without_the_producer_s_key_is_told_so_and_books_no_damage(tmp_path):
    make_keys(tmp_path / "keys", ["generator-0", "learner-0"])
    keys = str(tmp_path / "keys")
    shelf = Shelf(RUN, "generator-0", "tcp://127.0.0.1:5555", 1 << 20, keys=keys)
    segment = shelf.write([b"abc"])
    (tmp_path / "keys" / "generator-0.public").unlink()
    reader = PayloadReader(RUN, Puller(RUN, "learner-0", 1.0, 1 << 20, keys=keys))
    with pytest.raises(ConfigError, match=r"generator-0\.public"):
        reader.read(Payloads(groups=(item(shelf, segment),)), [], {0: None})
    reader.close()
    shelf.close(unlink=True)


def test_an_address_that_is_none_and_a_length_that_is_another_are_errors(shelf, puller):
    segment = shelf.write([b"abcd"])
    with pytest.raises(QueueError, match="cannot be asked"):
        puller.pull(item(shelf, segment, source="nothing://at-all"))
    with pytest.raises(SchemaError, match="has 5 bytes; met 4"):
        puller.pull(item(shelf, segment, lengths=(5,)))


def test_strangers_are_counted_and_get_nothing(shelf, puller, caplog):
    segment = shelf.write([b"secret"])
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(shelf.source)
    ask = Pull(protocol=PROTOCOL_VERSION, run_id=RUN, segment=segment.name)
    other = [msgspec.structs.replace(ask, run_id="run-2"), msgspec.structs.replace(ask, protocol=PROTOCOL_VERSION - 1)]
    garbage = [b"", b"\xc1", os.urandom(200), msgspec.msgpack.encode({"segment": 7})]
    for frame in [*garbage, *map(msgspec.msgpack.encode, other)]:
        stranger.send(frame)
    assert puller.pull(item(shelf, segment)) == [b"secret"]
    assert stranger.poll(100) == 0
    assert shelf.refused == {"not a request": 4, "another run or protocol": 2}
    assert f"refused at {shelf.source} (another run or protocol, 2 so far)" in caplog.messages
    stranger.close()
    context.term()


def test_the_network_is_listened_to_with_keys_alone(tmp_path, monkeypatch):
    make_keys(tmp_path / "keys", ["generator-0", "learner-0", "learner-1"])
    (tmp_path / "keys" / "allowed" / "learner-1.public").unlink()
    keys = str(tmp_path / "keys")
    shelf = Shelf(RUN, "generator-0", "tcp://127.0.0.1:5555", 1 << 20, keys=keys)
    segment = shelf.write([b"abc"])
    for name, answers in (("learner-0", True), ("learner-1", False)):
        puller = Puller(RUN, name, 1.0, 1 << 20, keys=keys)
        if answers:
            assert puller.pull(item(shelf, segment)) == [b"abc"]
        else:
            with pytest.raises(QueueError, match="did not answer"):
                puller.pull(item(shelf, segment))
        puller.close()
    shelf.close(unlink=True)
    monkeypatch.setattr(direct, "_beside", lambda broker: "tcp://192.0.2.1:*")  # whatever networks this machine has
    with pytest.raises(ConfigError, match="lets in known keys alone"):
        Shelf(RUN, "generator-0", "tcp://192.0.2.1:5555", 1 << 20)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("payload of")]
