"""Real processes, no Ray: what a reaper leaves behind, whoever dies first."""

import os
import signal
import subprocess
import sys
import time

import pytest

from asyncrl.launch.launcher import Launcher

TREE = "import os, subprocess, sys, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True); print(p.pid, flush=True); {then}"


def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def launcher(tmp_path):
    made = Launcher()
    made.log = tmp_path / "child.log"
    yield made
    made.kill()


def start(launcher, then, grace_s=2.0):
    pid = launcher.start([sys.executable, "-c", TREE.format(then=then)], {}, str(launcher.log), grace_s)
    assert wait_for(lambda: launcher.log.exists() and launcher.log.read_text().strip())
    return pid, int(launcher.log.read_text().split()[0])


def test_an_exit_code_and_the_last_line_come_back_and_the_grandchild_is_gone(launcher):
    pid, grandchild = start(launcher, "print('broken pipe of reason'); sys.exit(3)")
    assert wait_for(lambda: launcher.state().exit_code is not None)
    assert launcher.state().exit_code == 3
    assert launcher.state().last_line == "broken pipe of reason"
    assert not alive(pid) and not alive(grandchild)


def test_kill_9_of_the_process_is_reported_as_its_signal(launcher):
    pid, grandchild = start(launcher, "time.sleep(600)")
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: launcher.state().exit_code is not None)
    assert launcher.state().exit_code == 128 + signal.SIGKILL
    assert wait_for(lambda: not alive(grandchild))


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(launcher):
    pid, grandchild = start(
        launcher, "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)", grace_s=0.5
    )
    assert wait_for(lambda: "deaf" in launcher.log.read_text())
    launcher.terminate()
    assert wait_for(lambda: launcher.state().exit_code is not None, 8.0)
    assert not alive(pid) and not alive(grandchild)


def test_a_dead_launcher_takes_its_whole_tree_along(tmp_path):
    log = tmp_path / "child.log"
    tree = TREE.format(then="time.sleep(600)")
    code = (
        "import sys, time; from asyncrl.launch.launcher import Launcher; l = Launcher(); "
        f"print(l.start([sys.executable, '-c', {tree!r}], {{}}, {str(log)!r}, 2.0), flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pid = int(owner.stdout.readline())
    assert wait_for(lambda: log.exists() and log.read_text().strip())
    grandchild = int(log.read_text().split()[0])
    owner.kill()
    owner.wait()
    assert wait_for(lambda: not alive(pid) and not alive(grandchild))


def test_a_killed_reaper_leaves_no_process_in_the_group(launcher):
    pid, _ = start(launcher, "time.sleep(600)")
    launcher._reaper.kill()
    assert wait_for(lambda: not alive(pid))
    assert launcher.state().exit_code == 128 + signal.SIGKILL


def test_shared_memory_of_a_killed_process_is_removed(launcher):
    make = (
        "from multiprocessing import shared_memory as m, resource_tracker as t; s = m.SharedMemory(create=True, size=4096); "
        "t.unregister(s._name, 'shared_memory'); print(s.name, flush=True); time.sleep(600)"
    )
    pid, _ = start(launcher, make)
    assert wait_for(lambda: len(launcher.log.read_text().split()) == 2)
    segment = f"/dev/shm/{launcher.log.read_text().split()[1]}"
    time.sleep(2.5)  # the reaper looks every two seconds
    os.kill(pid, signal.SIGKILL)
    assert os.path.exists(segment)
    assert wait_for(lambda: not os.path.exists(segment))
