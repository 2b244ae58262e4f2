import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "zmq", "transformers")


@pytest.mark.parametrize(
    "module", ["asyncrl", "asyncrl.config", "asyncrl.config.run_dir", "asyncrl.algorithms", "asyncrl.trajectory", "asyncrl.errors"]
)
def test_the_light_modules_load_nothing_heavy(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_listing_the_options_loads_nothing_heavy():
    code = f"import sys; from asyncrl.cli import main; main(['config', 'queue']); print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
