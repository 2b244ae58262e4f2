"""Scores a model greedily on held-out prompts, in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import ProcessDied, StopRequested
from asyncrl.launch import processes
from asyncrl.launch.supervisor import ProcessSpec, Supervisor

__all__ = ["evaluate_ends", "finish"]

LIMIT_S = 900.0


def finish(supervisor: Supervisor, spec: ProcessSpec, asked_to_stop: Callable[[], bool]) -> None:
    """Runs a process to its end.

    Raises:
        ProcessDied: it failed, with its last log line, or was not done in time. StopRequested: ``asked_to_stop`` said so.
    """
    supervisor.start(spec)
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        for exit_ in supervisor.poll():
            if exit_.name == spec.name:
                if exit_.code == 0:
                    return
                raise ProcessDied(f"{spec.name} failed ({exit_.reason}); its last line: {exit_.last_line}", process=spec.name)
        if asked_to_stop():
            raise StopRequested(f"asked to stop while {spec.name} ran", process=spec.name)
        time.sleep(0.2)
    raise ProcessDied(f"{spec.name} was not done after {LIMIT_S:g} s", process=spec.name)


def evaluate_ends(
    supervisor: Supervisor, run_dir: RunDir, config: Config, facts: RunFacts, asked_to_stop: Callable[[], bool]
) -> dict[str, float]:
    """Greedy accuracy of the starting model and of the exported one, on prompts that training never saw.

    Returns:
        ``eval_start`` and ``eval_end``, shares in [0, 1].

    Raises:
        ProcessDied: an evaluation failed, with its last log line. StopRequested: ``asked_to_stop`` said so.
    """
    found: dict[str, float] = {}
    for name, model in (("start", facts.model_dir), ("end", str(run_dir.export))):
        finish(supervisor, processes.evaluation(run_dir, config, facts, name, model), asked_to_stop)
        found[f"eval_{name}"] = float(json.loads((run_dir.path / f"eval-{name}.json").read_text())["accuracy"])
    return found
