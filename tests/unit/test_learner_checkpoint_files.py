from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl.config.run_dir import RunDir
from asyncrl.errors import DataError, PeerTimeout
from asyncrl.learner.checkpoint import CheckpointWriter, Manifest, checkpoint_folder, prune, read_manifest
from asyncrl.learner.control import Control
from asyncrl.queue.messages import Frontier

FRONTIER = Frontier(steps=3, low=48, settled_above=(50, 51), trained=48, dropped={"no_signal": 2})


class Paper:
    """A file that is being written until told otherwise."""

    def __init__(self, file: Path, dies: bool) -> None:
        self.file, self.dies, self.written, self.never = file, dies, False, False

    def done(self) -> bool:
        return self.written

    def wait(self, timeout_s: float) -> bool:
        if self.dies:
            raise RuntimeError("disk")
        if self.never:
            return False
        self.file.write_text("weights")
        return True


class FileEngine:
    """Writes one file, or dies before it."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies

    def save(self, folder: Path, synced: bool = True) -> Paper:
        assert not (folder / "manifest.json").exists()
        self.paper = Paper(folder / "shard", self.dies)
        return self.paper


def manifest(step: int) -> Manifest:
    return Manifest(
        run_id="r", step=step, incarnation=1, frontier=FRONTIER, engine="fsdp2", world_size=1, dtype="float32", versions={"torch": "2"}
    )


def save(run_dir: RunDir, step: int, keep: int = 2, dies: bool = False) -> Path:
    writer = CheckpointWriter(FileEngine(dies), Control(0, 1, 1.0), run_dir, keep)
    writer.begin(manifest(step))
    folder = writer.finish(wait=True)
    assert folder is not None
    return folder


def test_a_checkpoint_counts_when_all_of_it_is_written_and_the_next_one_waits_for_that(tmp_path: Path):
    run_dir, engine = RunDir(tmp_path), FileEngine()
    writer = CheckpointWriter(engine, Control(0, 1, 1.0), run_dir, 2)
    assert writer.finish(wait=True) is None
    writer.begin(manifest(1))
    assert writer.finish(wait=False) is None and run_dir.latest_checkpoint() is None
    engine.paper.written = True
    assert writer.finish(wait=False) == checkpoint_folder(run_dir, 1) == run_dir.latest_checkpoint()
    writer.begin(manifest(2))
    assert run_dir.latest_checkpoint() == checkpoint_folder(run_dir, 1)
    writer.begin(manifest(3))
    assert run_dir.latest_checkpoint() == checkpoint_folder(run_dir, 2)


def test_a_disk_that_takes_nothing_ends_the_wait_with_the_step_and_the_option(tmp_path: Path):
    engine = FileEngine()
    writer = CheckpointWriter(engine, Control(0, 1, 0.0), RunDir(tmp_path), 2)
    writer.begin(manifest(4))
    engine.paper.never = True
    with pytest.raises(PeerTimeout, match=r"launch\.stall_timeout_s = 0 s; that of step 4 is not"):
        writer.finish(wait=True)
    assert RunDir(tmp_path).latest_checkpoint() is None


def test_the_manifest_comes_last_and_gives_the_frontier_back(tmp_path: Path):
    folder = save(RunDir(tmp_path), 3)
    assert (folder / "shard").read_text() == "weights"
    assert read_manifest(folder) == manifest(3)
    assert msgspec.json.decode((folder / "manifest.json").read_bytes())["frontier"]["settled_above"] == [50, 51]


def test_only_the_newest_are_kept(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    for step in (5, 10, 15):
        save(run_dir, step)
    assert sorted(p.name for p in run_dir.checkpoints.iterdir()) == ["step-000010", "step-000015"]
    assert run_dir.latest_checkpoint() == checkpoint_folder(run_dir, 15)


def test_a_death_in_mid_write_leaves_the_older_checkpoint_in_force(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    save(run_dir, 5)
    with pytest.raises(RuntimeError, match="disk"):
        save(run_dir, 10, dies=True)
    assert run_dir.latest_checkpoint() == checkpoint_folder(run_dir, 5)
    save(run_dir, 10)
    assert run_dir.latest_checkpoint() == checkpoint_folder(run_dir, 10)


def test_an_unfinished_folder_is_not_pruned_as_if_it_were_whole(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    save(run_dir, 5)
    checkpoint_folder(run_dir, 9).mkdir()
    prune(run_dir, 1)
    assert run_dir.latest_checkpoint() == checkpoint_folder(run_dir, 5)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(DataError, match="is not a manifest"):
        read_manifest(tmp_path)
