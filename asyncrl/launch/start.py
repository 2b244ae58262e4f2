"""Makes a run directory ready for a start: a fresh run, or the next incarnation of an old one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from asyncrl.config import Config, TaskConfig
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.guardian import scratch_folder
from asyncrl.launch.models import prepare_model
from asyncrl.launch.preflight import check_config, check_model, device_of

FIXED = (
    "recipe", "run_dir", "model", "learner.lora_rank", "learner.lora_alpha", "algorithm.groups_per_step",
    "queue.schedule", "queue.max_staleness",
    *(f"task.{name}" for name in TaskConfig.model_fields if name not in ("reward_timeout_s", "eval_size")),
)  # fmt: skip

__all__ = ["check_same_run", "endpoints", "free_port", "model_cache", "prepare_resume", "prepare_run"]


def prepare_run(config: Config) -> RunDir:
    """Checks a configuration and lays out a new run directory.

    Raises:
        ConfigError: a setting that cannot work, or a run directory that is in use.
    """
    check_config(config)
    model_dir = prepare_model(config.model, model_cache())
    check_model(config, model_dir)
    path = Path(config.run_dir or f"runs/{config.recipe or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    run_dir = RunDir(path)
    if run_dir.facts_file.exists():
        raise ConfigError(f"run_dir={path} holds a run already: continue it with `asyncrl resume {path}`, or name another")
    for folder in (run_dir.path, run_dir.logs, run_dir.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    run_dir.lock()
    run_dir.write_config(config.model_copy(update={"run_dir": str(path)}))
    run_dir.write_facts(_facts(config, secrets.token_hex(4), 0, model_dir, None))
    return run_dir


def prepare_resume(run_dir: RunDir, config: Config) -> RunDir:
    """Opens the next incarnation of a run from its newest checkpoint, or from the start when it has none.

    Raises:
        ConfigError: a setting that cannot work.
        DataError: not a run directory, or its processes still live.
    """
    old = run_dir.read_facts()
    run_dir.lock()
    _check_not_alive(run_dir)
    check_same_run(run_dir.read_config(), config)
    check_config(config)
    checkpoint = run_dir.latest_checkpoint()
    model_dir = prepare_model(config.model, model_cache())
    check_model(config, model_dir)
    run_dir.ending.unlink(missing_ok=True)
    shutil.rmtree(run_dir.export, ignore_errors=True)
    if run_dir.read_config().queue.shards != config.queue.shards:
        # tickets lie in other shards now: from the checkpoint's frontier they are sampled again
        shutil.rmtree(run_dir.queue, ignore_errors=True)
    run_dir.write_config(config)
    run_dir.write_facts(_facts(config, old.run_id, old.incarnation + 1, model_dir, checkpoint))
    return run_dir


def model_cache() -> Path:
    """Folder of the built-in models that were made ready here."""
    return Path(os.environ.get("ASYNCRL_CACHE", Path.home() / ".cache" / "asyncrl")) / "models"


def _facts(config: Config, run_id: str, incarnation: int, model_dir: Path, checkpoint: Path | None) -> RunFacts:
    sync, *brokers = endpoints(config, run_id)
    return RunFacts(
        run_id=run_id,
        incarnation=incarnation,
        queue_endpoints=tuple(brokers),
        sync_endpoint=sync,
        rendezvous=f"file://{scratch_folder(run_id)}/rendezvous-{incarnation}",
        model_dir=str(model_dir),
        generator_device=device_of(config.generator.device),
        learner_device=device_of(config.learner.device),
        checkpoint=str(checkpoint or ""),
    )


def endpoints(config: Config, run_id: str) -> list[str]:
    """Where sync and then each broker listen; makes the folder of their sockets."""
    scratch = scratch_folder(run_id)
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    shards, first = config.queue.shards, config.queue.port
    if config.queue.transport == "ipc":
        return [f"ipc://{scratch}/sync", *(f"ipc://{scratch}/queue-{n}" for n in range(shards))]
    return [f"tcp://{config.queue.host}:{first + n if first else free_port(config.queue.host)}" for n in range(shards + 1)]


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine's address that was free a moment ago.

    Raises:
        ConfigError: the address is none of this machine's.
    """
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(f"queue.host is an address of this machine; {host} cannot be bound ({error.strerror})") from error
        return int(probe.getsockname()[1])


def check_same_run(old: Config, new: Config) -> None:
    """What may not change in mid-run: ticket n of a frontier is prompt n, and adapters' weights count alpha / rank."""
    before, after = old.model_dump(), new.model_dump()
    changed = [name for name in FIXED if _value(before, name) != _value(after, name)]
    if changed:
        raise ConfigError(f"{', '.join(changed)} cannot change when a run is resumed: start a new run, from an export if need be")


def _value(options: dict[str, Any], name: str) -> Any:
    group, _, leaf = name.partition(".")
    return options[group][leaf] if leaf else options[group]


def _check_not_alive(run_dir: RunDir) -> None:
    file = run_dir.path / "ray.json"
    if not file.exists():
        return
    pid = int(json.loads(file.read_text())["pid"])
    command = Path(f"/proc/{pid}/cmdline")
    if command.exists() and b"asyncrl.launch.guardian" in command.read_bytes():
        raise DataError(f"{run_dir.path} still runs (guardian pid {pid}): stop it first")
