"""B56: numbers without a gap, repeats answered from memory, sizes checked by the sender."""

from __future__ import annotations

import msgspec
import pytest
from gate_setup import meta_of

from asyncrl.errors import LostMessage, PeerTimeout, QueueError, SchemaError, UnknownSession, VersionError
from asyncrl.queue.messages import PROTOCOL_VERSION, Commit, Done, Hello, Put, PutItem, Refused, Reply, Request, Role, StatusRequest
from asyncrl.queue.records import Issue
from asyncrl.queue.sessions import Arrival, Session, Sessions
from asyncrl.queue.wire import Dialogue, Envelope, decode_envelope, decode_request, encode

HELLO = Hello(role=Role.PRODUCER)


def envelope(sequence: int, sender: str = "generator-0") -> Envelope:
    return Envelope(protocol=PROTOCOL_VERSION, run_id="r", sender=sender, sequence=sequence)


def dialogue(limit: int = 1 << 20) -> Dialogue:
    return Dialogue(endpoint="ipc:///q", run_id="r", sender="generator-0", max_message_bytes=limit)


def test_b56_a_gap_in_the_numbers_is_an_error_and_uses_up_no_number() -> None:
    session = Session("generator-0", b"a", HELLO, 0)
    assert session.arrive(1) is Arrival.NEW
    with pytest.raises(LostMessage, match="after 1 came 3: messages were lost"):
        session.arrive(3)
    assert session.arrive(2) is Arrival.NEW


def test_b56_a_repeat_waits_with_the_first_or_gets_its_answer_again() -> None:
    session = Session("generator-0", b"a", HELLO, 0)
    session.arrive(1)
    assert session.arrive(1) is Arrival.WAITING
    session.answer(1, [b"answer"])
    assert session.arrive(1) is Arrival.REPEAT and session.kept(1) == [b"answer"]


def test_b56_an_answer_with_payload_is_given_anew_and_not_kept() -> None:
    session = Session("learner-0", b"a", HELLO, 0)
    session.arrive(1)
    session.answer(1, [b"header", b"payload"])
    assert session.arrive(1) is Arrival.REPEAT and session.kept(1) == []


def test_b56_only_so_many_answers_are_kept() -> None:
    session = Session("generator-0", b"a", HELLO, 0)
    for number in range(1, 67):
        session.arrive(number)
        session.answer(number, [b"x"], [(number, 0)])
    assert session.arrive(3) is Arrival.REPEAT
    assert session.granted() == [(number, 0) for number in range(3, 67)]
    with pytest.raises(LostMessage, match="repeats 2, which"):
        session.arrive(2)


def test_b56_a_hello_closes_a_gap_and_what_was_lost_before_it_is_asked_anew() -> None:
    session = Session("generator-0", b"a", HELLO, 0)
    session.arrive(1)
    for number in (3, 4):  # 2 was lost
        with pytest.raises(LostMessage):
            session.arrive(number)
    assert session.greeted_again(5) is Arrival.NEW and session.greeted_again(5) is Arrival.REPEAT
    assert session.arrive(6) is Arrival.NEW
    for number in (2, 3, 4):
        with pytest.raises(LostMessage, match=f"repeats {number}, which never came .*: ask anew"):
            session.arrive(number)
    assert session.arrive(1) is Arrival.WAITING, "what had come is still answered"


def test_more_numbers_beyond_a_gap_than_a_client_sends_are_a_strangers() -> None:
    session = Session("generator-0", b"a", HELLO, 0)
    kinds = []
    for number in range(2, 2 + 258):
        with pytest.raises(QueueError) as caught:
            session.arrive(number)
        kinds.append(type(caught.value))
    assert kinds == [LostMessage] * 256 + [QueueError] * 2
    session.arrive(1)
    with pytest.raises(LostMessage):
        session.arrive(3)


def test_a_name_belongs_to_the_process_that_greeted_last() -> None:
    sessions = Sessions()
    with pytest.raises(QueueError, match="generator-0 is not known here"):
        sessions.of(envelope(1), b"a")
    sessions.open(envelope(0), b"a", HELLO)
    assert sessions.greeted(envelope(0), b"a") and not sessions.greeted(envelope(0), b"b")
    sessions.open(envelope(0), b"b", HELLO)
    with pytest.raises(QueueError, match="another one has said hello as generator-0"):
        sessions.of(envelope(1), b"a")
    assert sessions.of(envelope(1), b"b").identity == b"b"
    sessions.close("generator-0")
    with pytest.raises(QueueError, match="not known"):
        sessions.of(envelope(1), b"b")


def test_b56_a_message_over_the_limit_is_refused_by_its_sender_and_uses_up_no_number() -> None:
    talk = dialogue(limit=1 << 20)
    put = StatusRequest()
    with pytest.raises(QueueError, match=r"queue.max_message_mib = 1 MiB \(1048576 bytes\); met 1048577 bytes") as caught:
        talk.request(put, [bytes((1 << 20) + 1)])
    assert caught.value.endpoint == "ipc:///q"
    sequence, frames = talk.request(put, [bytes(1 << 20)])
    assert sequence == 0 and len(frames[1]) == 1 << 20
    talk.sent(sequence)
    assert talk.request(StatusRequest())[0] == 1


def test_a_refusal_becomes_the_error_that_it_names_and_an_unknown_one_a_queue_error() -> None:
    talk = dialogue()
    error = talk.refusal(Refused(kind="VersionError", message="too old"))
    assert type(error) is VersionError and error.endpoint == "ipc:///q"
    for kind in ("Exception", "Any", "no such class"):
        assert type(talk.refusal(Refused(kind=kind, message="m"))) is QueueError
    assert type(talk.refusal(Refused(kind="PeerTimeout", message="m"))) is PeerTimeout


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x80", b"not msgpack", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"protocol": "1"})]
)
def test_frames_that_are_no_request_are_schema_errors(frame: bytes) -> None:
    with pytest.raises(SchemaError):
        decode_envelope(frame)
    with pytest.raises(SchemaError):
        decode_request(frame)


def test_an_envelope_is_read_although_its_body_is_of_another_protocol() -> None:
    frame = msgspec.msgpack.encode({"protocol": 99, "run_id": "r", "sender": "s", "sequence": 4, "body": {"type": "telepathy"}})
    assert decode_envelope(frame) == Envelope(protocol=99, run_id="r", sender="s", sequence=4)
    with pytest.raises(SchemaError, match="the body is one of the queue's requests"):
        decode_request(frame)


def test_requests_and_replies_survive_the_wire() -> None:
    meta = meta_of(Issue(ticket=5, attempt=1, not_before_version=0, exact_version=-1), 0)
    request = Request(
        protocol=PROTOCOL_VERSION, run_id="r", sender="s", sequence=1, body=Put(groups=(PutItem(meta=meta, checksum=9, lengths=(10,)),))
    )
    assert decode_request(encode(request)) == request
    assert dialogue().reply([encode(Reply(sequence=3, body=Done())), b"p"]) == (3, Done(), [b"p"])


def test_numbers_that_no_queue_counts_to_are_refused_when_they_are_decoded() -> None:
    def put(**changes: object) -> None:
        meta = meta_of(Issue(ticket=0, attempt=0, not_before_version=0, exact_version=-1), 0)
        item = PutItem(meta=meta, checksum=1, lengths=(8,))
        body = msgspec.to_builtins(Request(protocol=PROTOCOL_VERSION, run_id="r", sender="s", sequence=0, body=Put(groups=(item,))))
        body["body"]["groups"][0].update({k: v for k, v in changes.items() if k in ("checksum", "lengths")})
        body["body"]["groups"][0]["meta"].update({k: v for k, v in changes.items() if k not in ("checksum", "lengths")})
        decode_request(msgspec.msgpack.encode(body))

    put(payload_bytes=1 << 53, checksum=(1 << 64) - 1)
    for changes in (
        {"payload_bytes": 1 << 54},
        {"ticket": 1 << 63},
        {"lengths_N": [1 << 60, 2]},
        {"tokens_by_version": {0: 1 << 62}},
        {"checksum": -1},
        {"lengths": [1 << 60]},
        {"attempt": -2},
    ):
        with pytest.raises(SchemaError, match="Expected `int`"):
            put(**changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e12])
def test_a_priority_is_a_finite_number_that_the_order_takes(value: float) -> None:
    body = Commit(step=0, incarnation=0, priorities={3: value})
    with pytest.raises(SchemaError, match="Expected `float`"):
        decode_request(encode(Request(protocol=PROTOCOL_VERSION, run_id="r", sender="s", sequence=0, body=body)))


def test_the_session_that_was_silent_for_longest_goes_when_there_are_too_many() -> None:
    sessions = Sessions(limit=2)
    for sender in ("a", "b"):
        sessions.open(envelope(0, sender), sender.encode(), HELLO)
    sessions.of(envelope(1, "a"), b"a")
    sessions.open(envelope(0, "c"), b"c", HELLO)
    assert len(sessions) == 2 and sessions.of(envelope(1, "a"), b"a").sender == "a"
    with pytest.raises(UnknownSession, match="begins with a hello; b"):
        sessions.of(envelope(1, "b"), b"b")
