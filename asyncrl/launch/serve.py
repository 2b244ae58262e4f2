"""``asyncrl queue serve``: a queue by itself, in the foreground, for trainers of the user's own.

    options → run directory (config.json, run.json) → broker, or one process a shard → SIGINT, SIGTERM or a stop

Consumes options and signals; produces a run directory that clients join by its path alone. It waits for the brokers, each of
which ends when it is asked to, or with this process.

Served again over the same directory, the queue goes on where it was, and clients that still run go on with it. It begins
anew, as the next incarnation that fences older clients, when ``--checkpoint FOLDER`` names another frontier (the JSON file
``FOLDER/manifest.json`` with the frontier of a commit under ``frontier``), or when nothing was kept (``queue.durability=memory``).

Source: design note, section 4.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from asyncrl.config import Config
from asyncrl.config.compose import compose, override
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight import check_keys, check_ports
from asyncrl.launch.reaper import die_with_parent
from asyncrl.launch.start import check_same_run, endpoints
from asyncrl.queue.settings import check_liveness
from asyncrl.tasks import new_source

__all__ = ["prepare_serve", "serve"]

POLL_S = 0.2
STOP_S = 10.0
ADDRESS = ("transport", "host", "port", "shards")


def serve(path: Path, overrides: Sequence[str], checkpoint: Path | None = None) -> int:
    """Runs the brokers of a run directory until they are asked to end; returns the exit code.

    Raises:
        ConfigError: options that cannot work. DataError: the directory is in use.
    """
    run_dir = prepare_serve(path, overrides, checkpoint)
    facts = run_dir.read_facts()
    print(f"queue of run {facts.run_id}, incarnation {facts.incarnation}, in {run_dir.path}")
    for shard, endpoint in enumerate(facts.queue_endpoints):
        print(f"shard {shard} at {endpoint}", flush=True)
    if len(facts.queue_endpoints) > 1:
        return _serve_shards(run_dir, len(facts.queue_endpoints))
    from asyncrl.queue.__main__ import main

    return main([str(run_dir.path), "--patient"])


def prepare_serve(path: Path, overrides: Sequence[str], checkpoint: Path | None = None) -> RunDir:
    """Makes ``path`` a run directory that a queue can be served from, or the one that is there ready for the next start.

    Raises:
        ConfigError: options that cannot work, or may not change. DataError: the directory is in use.
    """
    run_dir = RunDir(path)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.lock()
    old = run_dir.read_facts() if run_dir.facts_file.exists() else None
    if old is not None and old.model_dir:
        raise ConfigError(f"{path} holds a training run: continue it with `asyncrl resume {path}`, or serve another directory")
    if old is None:
        config = compose([*overrides, f"run_dir={run_dir.path}"])
    else:
        config = override(run_dir.read_config(), overrides)
        check_same_run(run_dir.read_config(), config)
        _check_same_shards(run_dir, config)
    check_liveness(config)
    check_ports(config)
    check_keys(config)
    new_source(config)
    facts = _next_facts(run_dir, config, old, checkpoint)
    run_dir.write_config(config)
    run_dir.write_facts(facts)
    return run_dir


def _check_same_shards(run_dir: RunDir, config: Config) -> None:
    before = run_dir.read_config().queue.shards
    if config.queue.shards != before and any(run_dir.queue.glob("shard-*/ledger.sqlite")):
        raise ConfigError(
            f"{run_dir.queue} holds the tickets of {before} shards, and they stay where they are; met queue.shards={config.queue.shards}: "
            "serve another directory"
        )


def _next_facts(run_dir: RunDir, config: Config, old: RunFacts | None, checkpoint: Path | None) -> RunFacts:
    if checkpoint is not None and not (checkpoint / "manifest.json").is_file():
        raise ConfigError(f"--checkpoint names a folder with a manifest.json; {checkpoint} has none")
    run_id, incarnation = old.run_id if old else secrets.token_hex(4), old.incarnation if old else 0
    _, *brokers = endpoints(config, run_id)
    if old is not None:
        before = run_dir.read_config().queue
        incarnation += checkpoint is not None or before.durability == "memory" or config.queue.durability == "memory"
        if all(getattr(before, name) == getattr(config.queue, name) for name in ADDRESS):
            brokers = list(old.queue_endpoints)
    start = str(checkpoint.absolute()) if checkpoint else (old.checkpoint if old and incarnation == old.incarnation else "")
    return RunFacts(
        run_id=run_id,
        incarnation=incarnation,
        queue_endpoints=tuple(brokers),
        sync_endpoint="",
        rendezvous="",
        model_dir="",
        generator_device="cpu",
        learner_device="cpu",
        checkpoint=start,
    )


def _serve_shards(run_dir: RunDir, shards: int) -> int:
    """One process a shard; the first that ends ends all."""
    asked: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    command = (sys.executable, "-m", "asyncrl.queue", str(run_dir.path), "--patient", "--shard")
    brokers = [subprocess.Popen([*command, str(shard)], preexec_fn=die_with_parent) for shard in range(shards)]
    try:
        while not asked and all(broker.poll() is None for broker in brokers):
            time.sleep(POLL_S)
    finally:
        for broker in brokers:
            broker.terminate()
        deadline_s = time.monotonic() + STOP_S
        for broker in brokers:
            try:
                broker.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                broker.kill()
    return max(abs(broker.wait()) for broker in brokers)
