"""What the light part of the package may load."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "ray", "vllm", "zmq", "transformers", "reasoning_gym", "hydra", "pandas")


def test_tasks_load_no_engine_and_no_transport() -> None:
    code = f"import sys, asyncrl.tasks, asyncrl.launch.models; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
