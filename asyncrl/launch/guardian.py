"""Holds the Ray head of a run, and ends the run when its driver is gone.

    driver ── stdin pipe ──▶ guardian ── owns ──▶ Ray head ──▶ launchers ──▶ processes

Consumes one byte from the driver when all is over, or the end of the pipe when the driver died; produces
``ray.json`` with the cluster's address. After a driver's death it asks every launcher to end its process,
waits for the learner's checkpoint, writes what happened into the run directory and stops Ray. When the
guardian itself is killed, Ray dies with it, and the reapers of all processes with Ray.

    python -m asyncrl.launch.guardian RUN_DIR
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncrl.config.run_dir import RunDir, write_atomic
from asyncrl.launch.launcher import actor_name

__all__ = ["connect", "main", "ray_environment", "scratch_folder"]

DONE = b"d"


def scratch_folder(run_id: str) -> Path:
    """Where a run keeps its sockets and Ray's session; short, since socket paths are."""
    return Path(tempfile.gettempdir()) / f"asyncrl-{run_id}"


def ray_environment(scratch: Path, own_head: bool) -> None:
    """Settings that Ray reads at import: quiet, and for a head of its own a token that only this run knows."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve the real processes beside anything else
    if not own_head or "RAY_AUTH_MODE" in os.environ:  # what the user has set stays
        return
    token = scratch / "ray-token"
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


def connect(address: str, run_id: str) -> Any:
    """Joins the Ray cluster of a run quietly and returns the ray module."""
    import ray

    ray.init(address=address, namespace=f"asyncrl-{run_id}", log_to_driver=False, logging_level="ERROR")
    return ray


def main(arguments: list[str]) -> int:
    """Starts or joins the cluster and waits for the driver; returns 0 when the driver ended the run itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_dir = RunDir(arguments[0])
    config, facts = run_dir.read_config(), run_dir.read_facts()
    scratch = scratch_folder(facts.run_id)
    ray_environment(scratch, own_head=not config.launch.ray_address)
    ray = connect(config.launch.ray_address, facts.run_id) if config.launch.ray_address else _start_head(config, facts.run_id, scratch)
    address = config.launch.ray_address or ray.get_runtime_context().gcs_address
    write_atomic(run_dir.path / "ray.json", json.dumps({"address": address, "pid": os.getpid()}))
    orderly = _wait_for_driver()
    if not orderly:
        _end_run(ray, run_dir, facts.run_id, config.launch.stop_grace_s)
    ray.shutdown()
    shutil.rmtree(scratch, ignore_errors=True)
    return 0 if orderly else 1


def _start_head(config: Any, run_id: str, scratch: Path) -> Any:
    import ray

    ray.init(
        include_dashboard=False,
        namespace=f"asyncrl-{run_id}",
        object_store_memory=config.launch.ray_object_store_mib << 20,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=str(scratch / "ray"),
        _node_ip_address="127.0.0.1",
    )
    return ray


def _wait_for_driver() -> bool:
    """True when the driver said that all is over, False when its end of the pipe closed."""
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 3600.0)
        if ready:
            return os.read(sys.stdin.fileno(), 1) == DONE


def _end_run(ray: Any, run_dir: RunDir, run_id: str, grace_s: float) -> None:
    message = "the driver died; its guardian ended the run"
    print(f"{message}: asking every process to end", flush=True)
    launchers = {}
    for log in sorted(run_dir.logs.glob("*.log")):
        with contextlib.suppress(ValueError):
            launchers[log.stem] = ray.get_actor(actor_name(run_id, log.stem))
    workers = [name for name in launchers if name != "queue"]
    _terminate(ray, [launchers[name] for name in workers], grace_s)
    _terminate(ray, [launchers[name] for name in launchers if name == "queue"], 2.0)
    for launcher in launchers.values():
        ray.kill(launcher)
    _note(run_dir, message)


def _terminate(ray: Any, launchers: list[Any], grace_s: float) -> None:
    end = time.monotonic() + grace_s
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get([launcher.terminate.remote() for launcher in launchers], timeout=5.0)
        while time.monotonic() < end:
            states = ray.get([launcher.state.remote() for launcher in launchers], timeout=5.0)
            if all(state.exit_code is not None for state in states):
                return
            time.sleep(0.2)
        ray.get([launcher.kill.remote() for launcher in launchers], timeout=10.0)


def _note(run_dir: RunDir, message: str) -> None:
    latest = run_dir.latest_checkpoint()
    how = f"continue with: asyncrl resume {run_dir.path}" if latest else "no checkpoint was written"
    summary = json.loads(run_dir.summary.read_text()) if run_dir.summary.exists() else {}
    summary.update(status="failed", message=f"{message}; {how}")
    write_atomic(run_dir.summary, json.dumps(summary, indent=1))
    print(summary["message"], flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
