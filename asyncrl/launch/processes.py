"""Which processes a run consists of: commands, environments, GPU shares."""

from __future__ import annotations

import sys

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.launch.supervisor import ProcessSpec
from asyncrl.queue.heap import streaming_copies

__all__ = ["brokers", "evaluation", "export", "generators", "is_broker", "learners"]


def brokers(run_dir: RunDir, config: Config) -> list[ProcessSpec]:
    """The brokers of the versioned queue."""
    command, shards = (sys.executable, "-m", "asyncrl.queue", str(run_dir.path)), config.queue.shards
    if shards == 1:
        return [ProcessSpec(name="queue", command=command)]
    return [ProcessSpec(name=f"queue-{shard}", command=(*command, "--shard", str(shard))) for shard in range(shards)]


def is_broker(name: str) -> bool:
    """Whether a process of this name is a broker."""
    return name.startswith("queue")


def learners(run_dir: RunDir, config: Config, facts: RunFacts) -> list[ProcessSpec]:
    """One process for each learner rank."""
    gpus = config.learner.num_gpus if facts.learner_device == "cuda" else 0.0
    command = (sys.executable, "-m", "asyncrl.learner", str(run_dir.path), "--rank")
    return [
        ProcessSpec(
            name=f"learner-{rank}",
            command=(*command, str(rank)),
            environment=_environment(config.learner.threads),
            num_gpus=gpus,
        )
        for rank in range(config.learner.ranks)
    ]


def generators(run_dir: RunDir, config: Config, facts: RunFacts) -> list[ProcessSpec]:
    """One process for each generator replica, in the generators' own interpreter."""
    command = (_python(config), "-m", "asyncrl.generators", str(run_dir.path), "--name")
    copies = streaming_copies() if config.queue.payload == "shm" else {}
    return [
        ProcessSpec(
            name=f"generator-{i}",
            command=(*command, f"generator-{i}"),
            environment={**_environment(config.generator.threads), **copies},
            num_gpus=_generator_gpus(config, facts),
        )
        for i in range(config.generator.replicas)
    ]


def export(run_dir: RunDir, config: Config) -> ProcessSpec:
    """Writes the newest checkpoint as a Hugging Face folder, for a run that was ended before its learner could."""
    command = (sys.executable, "-m", "asyncrl", "export", str(run_dir.path), str(run_dir.export))
    return ProcessSpec(name="export", command=command, environment=_environment(config.learner.threads))


def evaluation(run_dir: RunDir, config: Config, facts: RunFacts, name: str, model: str) -> ProcessSpec:
    """Greedy scoring of one model folder on the held-out prompts."""
    out = run_dir.path / f"eval-{name}.json"
    arguments = ("--model", model, "--run-config", str(run_dir.config_file), "--out", str(out))
    return ProcessSpec(
        name=f"eval-{name}",
        command=(_python(config), "-m", "asyncrl.generators.evaluate", *arguments),
        environment=_environment(config.generator.threads),
        num_gpus=_generator_gpus(config, facts),
    )


def _python(config: Config) -> str:
    return config.generator.python or sys.executable


def _generator_gpus(config: Config, facts: RunFacts) -> float:
    return config.generator.num_gpus if facts.generator_device == "cuda" else 0.0


def _environment(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
