import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.bench import BENCHMARKS, run_bench
from asyncrl.cli import main
from asyncrl.errors import AsyncRLError, UnsupportedError
from asyncrl.trajectory import decode_group, encode_group_frames
from benchmarks import codec, queue
from benchmarks.cells import Carried, measure, run_cell
from benchmarks.cpu import MARK, marked_cpu_s
from benchmarks.figures import Figure, table, write_json
from benchmarks.groups import make_group, token_bytes
from benchmarks.queue_rates import rate


def test_the_median_of_the_repeats_is_held_against_the_goal_in_memcpys(monkeypatch):
    monkeypatch.setitem(queue.GOALS, "shm", 3.0)
    costs = {"shm": iter([0.2, 0.9, 0.3]), "ray_queue": iter([3.3, 3.3, 3.3])}  # CPU s for 1 GB

    def cell(carrier, trajectory_mb, rounds):
        return Carried(cpu_s=next(costs[carrier]), num_bytes=10**9, num_groups=rounds)

    figures = queue.carry_all(3, 1, carriers=["shm", "ray_queue"], sizes_mb=[1.0], cell=cell, floor=lambda: 0.1)
    shm, ray, cheaper = figures
    assert (shm.value, shm.floor, round(shm.ratio, 9), shm.goal, shm.holds) == (0.3, 0.1, 3.0, 3.0, True)
    assert (ray.value, ray.goal, ray.holds) == (3.3, None, None)
    assert (round(cheaper.value, 9), cheaper.goal, cheaper.holds) == (11.0, 10.0, True)


def test_a_peer_that_is_not_installed_is_said_and_holds_nothing():
    def cell(carrier, trajectory_mb, rounds):
        return (
            Carried(missing="not installed: No module named 'transfer_queue'")
            if carrier == "transfer_queue"
            else Carried(cpu_s=1.0, num_bytes=10**9)
        )

    figures = queue.carry_all(1, 1, carriers=["shm", "transfer_queue"], sizes_mb=[8.0], cell=cell, floor=lambda: 0.1)
    for figure in figures[1:]:
        assert figure.value is None and figure.holds is None and "transfer_queue" in figure.note
    assert "not installed" in table(figures)


def test_the_cpu_time_of_what_a_cell_starts_is_counted():
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(1, flush=True)\ninput()"
    environment = {**os.environ, MARK: "test-mark"}
    shell = ["sh", "-c", f'"{sys.executable}" -c "$0" & wait', busy]
    with subprocess.Popen(shell, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        deadline = time.monotonic() + 20
        while sum(marked_cpu_s("test-mark").values()) < 0.25 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sum(marked_cpu_s("test-mark").values()) >= 0.25
        assert marked_cpu_s("another-mark") == {}
        process.stdin.close()


def test_warm_rounds_do_not_count():
    carried = iter([1, 10, 100, 1000])
    assert measure(lambda: next(carried), 2, "no-such-mark").num_bytes == 1100


def test_synthetic_groups_have_the_size_asked_for_and_obey_the_schema():
    group = make_group(3, 0.1)
    frames = encode_group_frames(group)
    assert token_bytes(group) == pytest.approx(300_000, rel=1e-3)
    assert sum(memoryview(frame).nbytes for frame in frames) == pytest.approx(token_bytes(group), rel=0.02)
    assert len(decode_group(frames).trajectories) == 3


def test_figures_are_written_as_a_list_of_objects(tmp_path):
    write_json(tmp_path / "f.json", [Figure(name="a", value=1.0, unit="s", goal=2.0, holds=True)])
    assert json.loads((tmp_path / "f.json").read_text())[0] == {
        "name": "a", "value": 1.0, "unit": "s", "floor": None, "ratio": None, "goal": 2.0, "holds": True, "note": "",
    }  # fmt: skip


def test_a_missed_goal_is_the_exit_code(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(queue, "run", lambda repeats: [Figure(name="a", value=4.0, unit="s", goal=3.0, holds=False)])
    assert main(["bench", "queue", "--json", str(tmp_path / "f.json")]) == 1
    assert "NO" in capsys.readouterr().out and (tmp_path / "f.json").exists()


def test_a_file_in_no_folder_is_refused_before_anything_is_measured():
    with pytest.raises(UnsupportedError, match="make the folder first"):
        run_bench("queue", Path("/no/such/folder/f.json"), 1)


def test_every_benchmark_has_its_module():
    for name in BENCHMARKS:
        assert (Path(queue.__file__).parent / f"{name}.py").is_file()


def test_a_cell_that_fails_is_said_holds_nothing_and_is_not_tried_again():
    tried = []

    def cell(carrier, trajectory_mb, rounds):
        tried.append(carrier)
        if carrier == "shm":
            raise AsyncRLError("cell shm was not done after 120 s")
        return Carried(cpu_s=1.0, num_bytes=10**9)

    shm, ipc = queue.carry_all(2, 1, carriers=["shm", "ipc"], sizes_mb=[1.0], cell=cell, floor=lambda: 0.2)
    assert (shm.value, shm.holds, shm.note) == (None, None, "cell shm was not done after 120 s")
    assert (ipc.ratio, ipc.holds) == (5.0, True)
    assert tried == ["shm", "ipc", "ipc"]


def test_the_codec_is_measured_in_memcpys():
    encode, decode = codec.figures(0.01, repeats=1)
    assert encode.name == "encode 64 x 0.01 MB" and decode.name == "decode 64 x 0.01 MB"
    assert decode.floor > 0 and decode.ratio == pytest.approx(decode.value / decode.floor)


@pytest.mark.parametrize("name", ["shm", "ipc_synced"])
def test_a_small_cell_of_the_queue_carries_through_real_processes(name):
    carried = run_cell(name, 0.01, 1, timeout_s=60.0)
    assert carried.missing == "" and carried.num_groups == 1
    assert carried.num_bytes == pytest.approx(4 * 64 * 10_000, rel=0.01)


def test_groups_a_second_are_counted_at_a_real_broker():
    groups_per_s, broker_cpu_s = rate(4, "memory", 0.2)
    assert groups_per_s > 1.0 and 0.0 <= broker_cpu_s < 1.0
