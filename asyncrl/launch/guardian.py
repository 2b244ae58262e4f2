"""Holds the Ray head of a run, and ends the run when its driver is gone.

    driver ── stdin pipe ──▶ guardian ── owns ──▶ Ray head ──▶ launchers ──▶ processes

Consumes one byte from the driver when all is over, or the end of the pipe when the driver died; produces
``ray.json`` with the cluster's address. After a driver's death it asks every launcher to end its process,
waits for the learner's checkpoint, writes what happened into the run directory and stops Ray. When the
guardian itself is killed, a head of its own dies with it, the launchers die with Ray, and the reapers end all processes.

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

__all__ = ["connect", "main", "ray_environment", "remove_traces", "scratch_folder"]

DONE = b"d"
QUEUE_GRACE_S = 2.0


def scratch_folder(run_id: str) -> Path:
    """Where a run keeps its sockets and Ray's session; short, since socket paths are."""
    return Path(tempfile.gettempdir()) / f"asyncrl-{run_id}"


def remove_traces(run_id: str) -> None:
    """Removes what killed processes of a run leave outside its directory: sockets, Ray's session, weights in shared memory."""
    shutil.rmtree(scratch_folder(run_id), ignore_errors=True)
    for segment in Path("/dev/shm").glob(f"asyncrl-{run_id}.*"):
        segment.unlink(missing_ok=True)


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
    remove_traces(facts.run_id)
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
    mine = [name for name in ray.util.list_named_actors() if name.startswith(f"asyncrl-{run_id}-")]
    queue = [name for name in mine if "-queue-" in name]
    _terminate(ray, [name for name in mine if name not in queue], grace_s)
    _terminate(ray, queue, QUEUE_GRACE_S)
    _note(run_dir, message)


def _terminate(ray: Any, names: list[str], grace_s: float) -> None:
    """Asks the processes of these launchers to end, kills those that do not; a launcher that is gone has taken its process along."""
    launchers = {}
    for name in names:
        with contextlib.suppress(ValueError):
            launchers[name] = ray.get_actor(name)
            launchers[name].terminate.remote()
    end = time.monotonic() + grace_s
    while launchers and time.monotonic() < end:
        for name, launcher in list(launchers.items()):
            if _ended(ray, launcher):
                ray.kill(launchers.pop(name))
        time.sleep(0.2)
    for launcher in launchers.values():
        ray.kill(launcher)  # its reaper ends the whole tree


def _ended(ray: Any, launcher: Any) -> bool:
    try:
        return ray.get(launcher.state.remote(), timeout=2.0).exit_code is not None
    except ray.exceptions.GetTimeoutError:
        return False
    except ray.exceptions.RayError:
        return True


def _note(run_dir: RunDir, message: str) -> None:
    latest = run_dir.latest_checkpoint()
    how = f"continue with: asyncrl resume {run_dir.path}" if latest else "no checkpoint was written"
    summary = json.loads(run_dir.summary.read_text()) if run_dir.summary.exists() else {}
    summary.update(status="failed", message=f"{message}; {how}")
    write_atomic(run_dir.summary, json.dumps(summary, indent=1))
    print(summary["message"], flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
