"""Scores a model greedily on held-out prompts, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import ProcessDied
from asyncrl.launch import processes
from asyncrl.launch.supervisor import ProcessSpec, Supervisor

__all__ = ["evaluate_ends", "finish"]

LIMIT_S = 900.0


def finish(supervisor: Supervisor, spec: ProcessSpec) -> None:
    """Runs a process to its end.

    Raises:
        ProcessDied: it failed, with its last log line, or was not done in time.
    """
    supervisor.start(spec)
    exits = supervisor.wait([spec.name], LIMIT_S)
    if not exits or exits[0].code != 0:
        reason = f"{exits[0].reason}; its last line: {exits[0].last_line}" if exits else f"not done after {LIMIT_S:g} s"
        raise ProcessDied(f"{spec.name} failed ({reason})", process=spec.name)


def evaluate_ends(
    supervisor: Supervisor, run_dir: RunDir, config: Config, facts: RunFacts, cancelled: Callable[[], bool]
) -> dict[str, float]:
    """Greedy accuracy of the starting model and of the exported one, on prompts that training never saw.

    Returns:
        ``eval_start`` and ``eval_end``, shares in [0, 1]; fewer where the run was asked to stop.

    Raises:
        ProcessDied: an evaluation failed, with its last log line.
    """
    found: dict[str, float] = {}
    for name, model in (("start", facts.model_dir), ("end", str(run_dir.export))):
        if cancelled():
            break
        finish(supervisor, processes.evaluation(run_dir, config, facts, name, model))
        found[f"eval_{name}"] = float(json.loads((run_dir.path / f"eval-{name}.json").read_text())["accuracy"])
    return found
