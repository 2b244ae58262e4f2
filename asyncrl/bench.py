"""``asyncrl bench NAME``: finds a benchmark of the source tree, runs it, prints its table and writes its figures as JSON.

The benchmarks lie beside the package and not in it: what is installed from a wheel has none.

Source: design note, section 4.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from asyncrl.errors import UnsupportedError

__all__ = ["BENCHMARKS", "run_bench"]

BENCHMARKS = {
    "learner": "optimizer steps of the FSDP2 engine on a CPU against a bare loop; what sharing, balance and chunks save",
    "queue": "CPU time of the queue's payload path against a memcpy, Ray's Queue and TransferQueue",
}
"""What can be run: module ``benchmarks.NAME`` and what it shows."""


def run_bench(name: str, json_file: Path | None, repeats: int) -> int:
    """Runs one benchmark; returns 1 if a figure misses its goal.

    Raises:
        UnsupportedError: there is no source tree around this package, or the folder for the JSON file is missing.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UnsupportedError(f"--json names a file in a folder that exists; met {json_file}: make the folder first")
    figures_module, module = _load("figures"), _load(name)
    figures = module.run(repeats=repeats)
    print(figures_module.table(figures), end="")
    if json_file is not None:
        figures_module.write_json(json_file, figures)
    return int(any(figure.holds is False for figure in figures))


def _load(name: str) -> Any:
    root = Path(__file__).parent.parent
    if not (root / "benchmarks" / f"{name}.py").is_file():
        raise UnsupportedError(f"benchmarks are part of the source tree, and {root} has none: install with pip install -e from a checkout")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{name}")
