import ctypes
import os
import subprocess
import sys

import pytest

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.launch.processes import generators
from asyncrl.queue.heap import LARGEST_BLOCK_BYTES, streaming_copies

FACTS = RunFacts(
    run_id="r", incarnation=0, queue_endpoints=(), sync_endpoint="", rendezvous="", model_dir="",
    generator_device="cpu", learner_device="cpu",
)  # fmt: skip

CODE = """
import resource, sys
from asyncrl.queue import heap
if sys.argv[1] == "kept":
    assert heap.keep_pages()
before = None
for _ in range(8):
    block = bytearray(int(sys.argv[2]))
    del block
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    before = faults if before is None else before
print(faults - before)
"""


def faults(how: str, num_bytes: int) -> int:
    return int(subprocess.run([sys.executable, "-c", CODE, how, str(num_bytes)], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="settings of glibc alone")
def test_pages_of_a_freed_block_serve_the_next_one_up_to_the_limit_of_glibc():
    size = LARGEST_BLOCK_BYTES - (1 << 20)
    assert faults("kept", size) < 100 < faults("plain", 2 * LARGEST_BLOCK_BYTES)


def test_the_setting_of_a_copying_process_is_not_passed_on_and_that_of_the_user_stays():
    code = "import os; from asyncrl.queue.heap import not_for_children as go; go(); print(os.environ.get('GLIBC_TUNABLES'))"
    for environment, expected in ((streaming_copies({}), "None"), ({"GLIBC_TUNABLES": "glibc.malloc.check=0"}, "glibc.malloc.check=0")):
        run = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == expected
    assert streaming_copies({"GLIBC_TUNABLES": "glibc.malloc.check=0"}) == {}


def test_generators_that_copy_into_shared_memory_are_started_with_it(tmp_path):
    for payload, expected in (("shm", True), ("inline", False)):
        config = Config.model_validate({"queue": {"payload": payload}})
        (spec,) = generators(RunDir(tmp_path), config, FACTS)
        assert ("GLIBC_TUNABLES" in spec.environment) is expected
