import numpy as np
import pyarrow as pa
import pytest

from asyncrl.errors import SchemaError
from asyncrl.trajectory import SCHEMA, Trajectory, TrajectoryGroup, VersionSpan, decode_group, encode_group


def make(**changes):
    fields = {
        "group_id": "g7", "ticket": 7, "attempt": 0, "sibling": 0, "sample": 0, "prompt_id": "p", "seed": 1, "incarnation": 0,
        "input_ids": [5, 6, 9, 8], "loss_mask": [False, False, True, True], "behavior_logprobs": [0.0, 0.0, -0.5, -1.5],
        "version_spans": [VersionSpan(2, 3), VersionSpan(3, 4)], "reward": 1.0, "finish_reason": "stop", "temperature": 1.0,
        "generator": "generator-0", "engine": "vllm", "dispatched_s": 0.0, "finished_s": 1.0,
        "reward_parts": {"match": 1.0}, "extra": {"answer": "68"},
    }  # fmt: skip
    return Trajectory.checked(**{**fields, **changes})


def test_each_token_knows_the_version_that_sampled_it():
    assert make().token_versions().tolist() == [-1, -1, 3, 4]
    assert make().oldest_version == 3


def test_a_group_comes_back_equal_from_the_wire():
    group = TrajectoryGroup(trajectories=(make(), make(sibling=1, input_ids=[5, 6, 9], loss_mask=[False, False, True],
        behavior_logprobs=[0.0, 0.0, -0.25], version_spans=[VersionSpan(2, 4)], reward=0.0)))  # fmt: skip
    back = decode_group(encode_group(group))
    for before, after in zip(group.trajectories, back.trajectories, strict=True):
        for name in SCHEMA.names:
            left, right = getattr(before, name), getattr(after, name)
            assert np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right, name
    assert back.meta().tokens_by_version == {3: 1, 4: 2}
    assert back.meta().rewards_N == (1.0, 0.0)


def test_rows_of_a_sliced_batch_keep_their_own_tokens():
    table = pa.ipc.open_stream(encode_group(TrajectoryGroup(trajectories=(make(), make(sibling=1, input_ids=[1, 2, 3, 4]))))).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(table.slice(1, 1))
    assert decode_group(sink.getvalue()).trajectories[0].input_ids.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"behavior_logprobs": [0.0, 0.0, float("nan"), -1.0]}, "behavior_logprobs"),
        ({"behavior_logprobs": [0.0, 0.0, 0.5, -1.0]}, "behavior_logprobs"),
        ({"behavior_logprobs": [0.0, -0.1, -0.5, -1.0]}, "behavior_logprobs"),
        ({"behavior_logprobs": [0.0, 0.0, -1.0]}, "behavior_logprobs"),
        ({"input_ids": [5, -6, 9, 8]}, "input_ids"),
        ({"loss_mask": [True, False, True, True]}, "loss_mask"),
        ({"loss_mask": [False] * 4, "behavior_logprobs": [0.0] * 4}, "loss_mask"),
        ({"version_spans": []}, "version_spans"),
        ({"version_spans": [VersionSpan(3, 1)]}, "version_spans"),
        ({"version_spans": [VersionSpan(2, 4), VersionSpan(3, 3)]}, "version_spans"),
        ({"reward": float("inf")}, "reward"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_a_broken_rule_is_named(changes, named):
    with pytest.raises(SchemaError, match=named):
        make(**changes)


def test_another_schema_version_is_refused():
    schema = SCHEMA.with_metadata({"asyncrl.schema_version": "0"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema):
        pass
    with pytest.raises(SchemaError, match="schema version is 1; met 0"):
        decode_group(sink.getvalue())


def test_a_missing_column_is_named():
    schema = pa.schema([f for f in SCHEMA if f.name != "reward"], metadata=SCHEMA.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema):
        pass
    with pytest.raises(SchemaError, match="reward"):
        decode_group(sink.getvalue())


@pytest.mark.parametrize("cut", [1, 64, 500, 2000])
def test_a_torn_payload_is_an_error_and_not_a_crash(cut):
    whole = encode_group(TrajectoryGroup(trajectories=(make(),)))
    with pytest.raises(SchemaError):
        decode_group(whole.slice(0, len(whole) - cut).to_pybytes())


def test_siblings_of_two_groups_do_not_travel_as_one():
    with pytest.raises(SchemaError, match="one group_id"):
        TrajectoryGroup(trajectories=(make(), make(sibling=1, group_id="g8")))
    with pytest.raises(SchemaError, match="distinct"):
        TrajectoryGroup(trajectories=(make(), make()))
