"""Fixtures of all tests: one real run at a time on a machine."""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest
import run_process

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session")
def _machine_lock_file():
    with (Path(tempfile.gettempdir()) / "asyncrl-tests.lock").open("w") as file:
        yield file


@pytest.fixture(autouse=True)
def machine_lock(request, _machine_lock_file):
    """Two real runs on one machine would starve each other: a test marked ``real`` holds a lock of the machine."""
    if request.node.get_closest_marker("real") is None or os.environ.get("ASYNCRL_REAL_LOCK_HELD"):
        yield
        return
    fcntl.flock(_machine_lock_file, fcntl.LOCK_EX)
    yield
    run_process.end_leftover_runs()
    fcntl.flock(_machine_lock_file, fcntl.LOCK_UN)
