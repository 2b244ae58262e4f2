"""Snapshots through real shared memory and real files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import ConfigError, SyncError
from asyncrl.sync.checksums import verify_checksums
from asyncrl.sync.snapshots import cast_for_engine, fingerprint, new_manifest
from asyncrl.sync.transports import new_transport, open_update

FACTS = RunFacts(
    run_id="transport-test",
    incarnation=3,
    queue_endpoints=(),
    sync_endpoint="",
    rendezvous="",
    model_dir="",
    generator_device="cpu",
    learner_device="cpu",
)


@pytest.fixture(params=["shm", "file"])
def transport(request, tmp_path):
    transport = new_transport(request.param, FACTS, RunDir(tmp_path))
    yield transport
    transport.close()


def raw_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def manifest_of(transport, tensors, update_id=1, ties=None):
    config = Config.model_validate({"sync": {"transport": transport.name}})
    return new_manifest(config, FACTS, transport.write(update_id, tensors), update_id=update_id, version=7, ties=ties or {})


def test_what_is_read_is_bit_for_bit_what_was_written_bfloat16_and_odd_shapes_too(transport):
    tensors = {
        "matrix": torch.randn(5, 3),
        "half": torch.tensor([1.5, -0.0, 3.0e38], dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "integers": torch.tensor([1, -1], dtype=torch.int64),
    }
    manifest = manifest_of(transport, tensors.items())
    verify_checksums(manifest)
    assert [spec.num_bytes for spec in manifest.tensors] == [60, 6, 24, 4, 0, 16]
    assert all(spec.offset % 64 == 0 for spec in manifest.tensors)
    with open_update(manifest) as views:
        read = {spec.name: (spec.dtype, spec.shape, bytes(view)) for spec, view in views}
    assert read == {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw_bytes(tensor)) for name, tensor in tensors.items()
    }
    assert read["half"][2] == b"\xc0\x3f\x00\x80\x62\x7f"


def test_a_flipped_bit_is_found_and_named(transport):
    manifest = manifest_of(transport, [("first", torch.zeros(100)), ("second", torch.zeros(100))])
    content = bytearray(Path(manifest.location).read_bytes())
    content[manifest.tensors[1].offset + 17] ^= 1
    Path(manifest.location).write_bytes(content)
    with pytest.raises(SyncError, match="checksum of second in version 7"):
        verify_checksums(manifest)


def test_a_segment_that_is_short_or_gone_is_an_error_with_its_name(transport):
    manifest = manifest_of(transport, [("first", torch.zeros(100))])
    Path(manifest.location).write_bytes(b"short")
    with pytest.raises(SyncError, match="has 5 bytes; its manifest says 448"):
        verify_checksums(manifest)
    transport.release(manifest.location)
    with pytest.raises(SyncError, match="cannot be opened"):
        verify_checksums(manifest)


def test_a_reader_keeps_its_view_when_the_segment_is_released_under_it(transport):
    manifest = manifest_of(transport, [("first", torch.full((1000,), 3.0))])
    with open_update(manifest) as views:
        transport.release(manifest.location)
        ((_, view),) = list(views)
        assert torch.frombuffer(view, dtype=torch.float32).sum() == 3000.0


def test_leftovers_of_a_killed_publisher_of_this_run_go_and_those_of_others_stay(transport, tmp_path):
    manifest = manifest_of(transport, [("first", torch.zeros(4))])
    other_facts = FACTS.model_copy(update={"run_id": "transport-test-2"})
    other = new_transport(transport.name, other_facts, RunDir(tmp_path / "other"))
    theirs = other.write(1, [("first", torch.zeros(4))])
    new_transport(transport.name, FACTS, RunDir(tmp_path))
    assert not Path(manifest.location).exists()
    assert Path(theirs.location).exists()
    other.close()
    assert not Path(theirs.location).exists()


def test_a_failed_write_leaves_nothing_behind(transport):
    def broken():
        yield "first", torch.zeros(4)
        raise SyncError("the learner failed")

    with pytest.raises(SyncError, match="the learner failed"):
        transport.write(9, broken())
    with pytest.raises(SyncError, match="met first twice"):
        transport.write(9, [("first", torch.zeros(4)), ("first", torch.zeros(4))])
    assert not list(Path("/dev/shm").glob("asyncrl-transport-test.*"))


def test_floating_point_tensors_are_cast_to_the_engines_dtype_before_they_travel(transport):
    master = [("weight", torch.tensor([1.0, 1.0 + 2**-20])), ("count", torch.tensor([3]))]
    manifest = manifest_of(transport, cast_for_engine(master, "bfloat16"))
    assert [(spec.dtype, spec.num_bytes) for spec in manifest.tensors] == [("bfloat16", 4), ("int64", 8)]


def test_b39_the_fingerprint_changes_with_any_tensor_and_only_then(transport):
    first = manifest_of(transport, [("a", torch.zeros(4)), ("b", torch.ones(4))], 1)
    same = manifest_of(transport, [("a", torch.zeros(4)), ("b", torch.ones(4))], 2)
    other = manifest_of(transport, [("a", torch.zeros(4)), ("b", torch.tensor([1.0, 1.0, 1.0, 1.0 + 1e-6]))], 3)
    assert fingerprint(first) == fingerprint(same) != fingerprint(other)


def test_b41_ties_must_name_what_is_sent_and_not_send_what_they_name(transport):
    tensors = [("embed", torch.zeros(4))]
    assert manifest_of(transport, tensors, 1, {"head": "embed"}).ties == {"head": "embed"}
    with pytest.raises(SyncError, match=r"names that are not sent \['other'\]"):
        manifest_of(transport, tensors, 2, {"head": "other"})
    with pytest.raises(SyncError, match=r"tied names that are sent \['embed'\]"):
        manifest_of(transport, tensors, 3, {"embed": "embed"})


def test_an_unknown_transport_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="one of file, shm; met 'pigeon'"):
        new_transport("pigeon", FACTS, RunDir(tmp_path))
