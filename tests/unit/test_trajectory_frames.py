import contextlib
import itertools
import json
import random
import resource
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import SchemaError
from asyncrl.queue.payload import checksum, frame_lengths
from asyncrl.trajectory import SCHEMA, Trajectory, TrajectoryGroup, VersionSpan, decode_group, encode_group, encode_group_frames


def trajectory(sibling, num_tokens, **changes):
    rng = np.random.default_rng(sibling)
    mask = np.ones(num_tokens, bool)
    mask[: max(1, num_tokens // 4)] = False
    fields = {
        "group_id": "g7", "ticket": 7, "attempt": 2, "sibling": sibling, "sample": 0, "prompt_id": "p", "seed": 2**62, "incarnation": 1,
        "input_ids": rng.integers(0, 1 << 17, num_tokens, dtype=np.int32), "loss_mask": mask,
        "behavior_logprobs": np.where(mask, -rng.random(num_tokens, dtype=np.float32), np.float32(0)),
        "version_spans": [VersionSpan(0, 3), VersionSpan(num_tokens - 1, 4)], "reward": 0.5 * sibling, "finish_reason": "stop",
        "temperature": 1.0, "generator": "generator-0", "engine": "vllm", "dispatched_s": 0.0, "finished_s": 1.0,
        "reward_parts": {"match": 1.0, "form": float(sibling)}, "extra": {"answer": "ü" * sibling, "turns": [1, {"a": None}]},
    }  # fmt: skip
    return Trajectory.checked(**{**fields, **changes})


def group_of(*lengths, **changes):
    return TrajectoryGroup(trajectories=tuple(trajectory(i, n, **changes) for i, n in enumerate(lengths)))


def assert_equal(before, after):
    for left, right in zip(before.trajectories, after.trajectories, strict=True):
        for name in SCHEMA.names:
            a, b = getattr(left, name), getattr(right, name)
            assert np.array_equal(a, b) and a.dtype == b.dtype if isinstance(a, np.ndarray) else a == b, name


def stream_of(batch, schema=None, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema or batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def batch_of(group):
    return pa.ipc.open_stream(encode_group(group)).read_next_batch()


def test_large_columns_leave_by_reference_and_come_back_as_views_of_their_frames():
    group = group_of(40_000, 30_000)
    frames = encode_group_frames(group)
    arrays = [getattr(t, name) for name in ("input_ids", "behavior_logprobs") for t in group.trajectories]
    addresses = {np.frombuffer(frame, np.uint8).ctypes.data for frame in frames}
    assert addresses >= {array.ctypes.data for array in arrays}
    assert len(frames) == 7  # four arrays, and what lies before, between and behind the two columns
    received = [bytes(frame) for frame in frames]
    back = decode_group(received)
    assert_equal(group, back)
    homes = [(np.frombuffer(frame, np.uint8).ctypes.data, len(frame)) for frame in received]
    for after in back.trajectories:
        for array in (after.input_ids, after.behavior_logprobs):
            assert any(start <= array.ctypes.data < start + size for start, size in homes)
            assert not array.flags.writeable


def test_the_frames_are_one_stream_that_arrow_reads_as_it_is():
    group = group_of(30_000, 2, 17)
    table = pa.ipc.open_stream(b"".join(encode_group_frames(group))).read_all()
    table.validate(full=True)
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert table.column("loss_mask").to_pylist() == [t.loss_mask.tolist() for t in group.trajectories]
    assert table.column("input_ids")[2].as_py() == group.trajectories[2].input_ids.tolist()
    assert sum(frame_lengths(encode_group_frames(group))) == len(encode_group(group))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([2, 3, 8, 100, 17_000, 40_001]), min_size=1, max_size=5), st.integers(0, 2**32))
def test_any_group_comes_back_equal_however_its_bytes_are_cut(lengths, seed):
    group = group_of(*lengths)
    whole = bytes(encode_group(group))
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.randrange(6)))
    frames = [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]
    assert_equal(group, decode_group(frames))
    assert_equal(group, decode_group(memoryview(whole)))
    assert checksum(frames) == checksum([whole]) == checksum(encode_group_frames(group))


def test_a_long_text_column_is_read_from_its_frame_and_not_taken_for_tokens():
    group = group_of(40_000, 40_000, extra={"log": "x" * 300_000})
    assert_equal(group, decode_group([bytes(frame) for frame in encode_group_frames(group)]))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_a_damaged_stream_is_an_error_or_another_group_and_never_a_crash(data):
    whole = bytearray(encode_group(group_of(40, 30)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 8))
        whole[place : place + 4] = data.draw(st.sampled_from([b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x01\0\0\0"]))
    cut = data.draw(st.integers(0, len(whole)))
    with contextlib.suppress(SchemaError):
        decode_group([bytes(whole[:cut]), bytes(whole[cut:])])


def test_a_body_that_claims_to_unpack_to_much_is_refused_unread():
    batch = batch_of(group_of(200_000))
    whole = bytearray(stream_of(batch, compression="lz4"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    claims = [i for i in range(len(whole) - 8) if struct.unpack_from("<q", whole, i)[0] == 800_000]
    assert claims
    for place in claims:
        struct.pack_into("<q", whole, place, 1 << 40)
    with pytest.raises(SchemaError, match="uncompressed"):
        decode_group(bytes(whole))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@pytest.mark.parametrize("claim", [1 << 20, 1 << 30, (1 << 31) - 8])
def test_lengths_beyond_the_payload_are_refused(claim):
    whole = bytearray(encode_group(group_of(40)))
    struct.pack_into("<i", whole, 4, claim)
    with pytest.raises(SchemaError, match="not a readable Arrow stream"):
        decode_group(bytes(whole))


def test_what_follows_the_batch_is_refused():
    batch = batch_of(group_of(40))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    for payload in (sink.getvalue().to_pybytes(), stream_of(batch) + b"\0" * 8):
        with pytest.raises(SchemaError, match="end mark"):
            decode_group(payload)


def test_an_unknown_column_is_named():
    batch = batch_of(group_of(40))
    schema = SCHEMA.append(pa.field("mood", pa.int8()))
    more = pa.RecordBatch.from_arrays([*batch.columns, pa.array([1], pa.int8())], schema=schema)
    with pytest.raises(SchemaError, match="mood"):
        decode_group(stream_of(more))


def test_a_null_is_named():
    batch = batch_of(group_of(40))
    columns = [pa.array([None], field.type) if field.name == "reward" else column for field, column in zip(SCHEMA, batch, strict=True)]
    schema = SCHEMA.set(SCHEMA.get_field_index("reward"), pa.field("reward", pa.float64()))
    with pytest.raises(SchemaError, match="reward: no nulls; met 1"):
        decode_group(stream_of(pa.RecordBatch.from_arrays(columns, schema=schema)))


@pytest.mark.parametrize("text", ["[" * 100_000, "3", "9" * 5000, "{", "null"])
def test_an_extra_that_is_no_json_object_is_refused(text):
    batch = batch_of(group_of(40))
    columns = [pa.array([text]) if field.name == "extra" else column for field, column in zip(SCHEMA, batch, strict=True)]
    with pytest.raises(SchemaError, match="extra is "):
        decode_group(stream_of(pa.RecordBatch.from_arrays(columns, schema=SCHEMA)))


def test_the_checksum_is_xxh3_and_sees_a_flipped_bit():
    assert checksum([b""]) == 0x2D06800538D394C2  # the published value for no bytes and seed 0
    frames = [bytes(frame) for frame in encode_group_frames(group_of(20_000))]
    damaged = [bytearray(frame) for frame in frames]
    damaged[-1][-1] ^= 1
    assert checksum(damaged) != checksum(frames)


def test_counts_by_version_agree_with_the_versions_of_the_tokens():
    group = group_of(101, 50)
    values, numbers = np.unique(np.concatenate([t.token_versions() for t in group.trajectories]), return_counts=True)
    expected = {int(v): int(n) for v, n in zip(values, numbers, strict=True) if v >= 0}
    assert group.meta().tokens_by_version == expected == {3: 76 + 38 - 2, 4: 2}
    assert json.dumps(group.meta().tokens_by_version)
