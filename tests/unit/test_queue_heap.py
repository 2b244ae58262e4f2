import ctypes
import subprocess
import sys

import pytest

from asyncrl.queue.heap import LARGEST_BLOCK_BYTES

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
