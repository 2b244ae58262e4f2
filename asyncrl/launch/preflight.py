"""Everything that can be checked before a process starts: liveness, devices, ports, lengths, the batch.

Shapes and ranges of single options were checked when they were read; here are the rules between them
and this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.engine_options import check_interleaved
from asyncrl.config.layout import Layout, check_model_layout, check_router_loss
from asyncrl.config.megatron_core import installed_version
from asyncrl.config.network import is_local
from asyncrl.errors import ConfigError, UnsupportedError
from asyncrl.queue.keys import SERVER_NAME, public_keys, read_secret
from asyncrl.queue.settings import check_liveness
from asyncrl.tasks import check_task

__all__ = ["check_config", "check_model", "check_ports", "device_of", "num_gpus"]


def check_config(config: Config) -> None:
    """Rules between options, and between options and this machine.

    Raises:
        ConfigError: the rule, the values met, the fix.
    """
    check_liveness(config)
    _check_host(config)
    ranks, replicas = range(config.learner.ranks), range(config.generator.replicas)
    check_keys(config, ["driver", *(f"learner-{n}" for n in ranks), *(f"generator-{n}" for n in replicas)])
    _check_batch(config)
    _check_devices(config)
    if config.learner.engine == "megatron":
        _check_megatron(config)
    check_ports(config)
    _check_interpreter(config)
    check_task(config)


def check_model(config: Config, model_dir: Path) -> None:
    """Rules between the lengths and the layout asked for and the model's own numbers.

    Raises:
        ConfigError: a response or context longer than the model's positions, heads that cannot be dealt to the ranks.
        UnsupportedError: a layout that is refused for models of this kind, a router's loss without a router.
    """
    description: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    limit = int(description.get("max_position_embeddings", 0))
    length = config.generator.max_model_len or limit
    if limit and length > limit:
        raise ConfigError(f"generator.max_model_len={length} exceeds the model's {limit} positions: lower it, or set 0")
    if config.generator.max_new_tokens >= length > 0:
        raise ConfigError(
            f"generator.max_new_tokens={config.generator.max_new_tokens} leaves no room for a prompt within {length} tokens: lower it"
        )
    check_model_layout(Layout.of(config.learner), description)
    check_router_loss(config.learner.router_loss, description)


def device_of(wanted: str) -> str:
    """``cpu`` or ``cuda`` for a device option."""
    return wanted if wanted != "auto" else ("cuda" if num_gpus() else "cpu")


def num_gpus() -> int:
    """NVIDIA GPUs that this machine shows, without loading torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _check_batch(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.group_size == 1:
        raise ConfigError("algorithm.group_size=1 gives every trajectory advantage 0: use at least 2")
    if algorithm.mini_batches > algorithm.groups_per_step:
        raise ConfigError(
            f"algorithm.mini_batches={algorithm.mini_batches} exceeds algorithm.groups_per_step={algorithm.groups_per_step}: "
            "a mini-batch holds at least one group"
        )
    longest = config.generator.max_new_tokens + 1
    if config.learner.micro_batch_tokens < longest:
        raise ConfigError(
            f"learner.micro_batch_tokens={config.learner.micro_batch_tokens} is less than one response with one prompt token ({longest})"
        )


def _check_devices(config: Config) -> None:
    here = num_gpus()
    shares = {
        "generator": (device_of(config.generator.device), config.generator.replicas * config.generator.num_gpus),
        "learner": (device_of(config.learner.device), config.learner.ranks * config.learner.num_gpus),
    }
    asked = sum(share for device, share in shares.values() if device == "cuda")
    if asked and not here:
        names = " and ".join(f"{name}.device" for name, (device, _) in shares.items() if device == "cuda")
        raise ConfigError(f"{names} is cuda, but this machine shows no NVIDIA GPU: set cpu or auto")
    if not config.launch.ray_address and shares["learner"][0] == "cuda" and config.learner.ranks > here:
        raise ConfigError(f"NCCL needs a GPU for each rank: learner.ranks={config.learner.ranks} and {here} are here")
    if not config.launch.ray_address and asked > here:
        raise ConfigError(
            f"{asked:g} GPUs are asked for and {here} are here: lower generator.num_gpus, learner.num_gpus, replicas or ranks"
        )


def _check_megatron(config: Config) -> None:
    try:
        installed_version()
    except ImportError as error:
        raise ConfigError(f"learner.engine=megatron: {error}: pip install 'asyncrl[megatron]', or set learner.engine=fsdp2") from error
    if device_of(config.learner.device) == "cuda":
        check_interleaved(config.learner)
    elif num_gpus():
        raise UnsupportedError(
            f"learner.device={config.learner.device} with learner.engine=megatron is not supported beside the {num_gpus()} GPUs here: "
            "megatron-core computes on a CPU only where torch sees none; nearest that works: CUDA_VISIBLE_DEVICES= or learner.engine=fsdp2"
        )


def check_ports(config: Config) -> None:
    """Whether the ports of queue and sync are free.

    Raises:
        ConfigError: one is not.
    """
    if config.queue.transport != "tcp" or config.queue.port == 0:
        return
    for port in range(config.queue.port, config.queue.port + config.queue.shards + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.queue.host, port))
            except OSError as error:
                raise ConfigError(f"queue.port: {port} is not free ({error.strerror}): choose another, or 0") from error


def check_keys(config: Config, clients: Sequence[str] = ()) -> None:
    """Whether the queue and these clients have keys, where keys are asked for.

    Raises:
        ConfigError: a key that is missing, malformed or readable by others; a client that would not be let in.
    """
    if not config.queue.keys:
        return
    folder = Path(config.queue.keys)
    for name in (SERVER_NAME, *clients):
        read_secret(folder, name)
    strangers = sorted(set(clients) - set(public_keys(folder / "allowed")[0].values()))
    if strangers:
        raise ConfigError(f"{folder / 'allowed'} has the public key of each client; {', '.join(strangers)} is missing: copy it there")


def _check_host(config: Config) -> None:
    if config.queue.transport == "tcp" and not is_local(f"tcp://{config.queue.host}:0"):
        raise UnsupportedError(
            f"training listens on this machine alone, since weights go out without keys; met queue.host={config.queue.host}: "
            "leave it at 127.0.0.1, or run `asyncrl queue serve` for trainers of your own"
        )


def _check_interpreter(config: Config) -> None:
    python = config.generator.python
    if python and not os.access(python, os.X_OK):
        raise ConfigError(f"generator.python={python} is not an executable file")
