"""The run directory: what lies where, and the facts of one start that every process reads.

A process of the run gets the directory and its own name, nothing else; ``run.json`` tells it the rest.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from asyncrl.config.schema import Config
from asyncrl.errors import DataError

__all__ = ["RunDir", "RunFacts", "write_atomic"]


class RunFacts(BaseModel):
    """What was decided for one start of a run.

    Attributes:
        run_id: one id for the whole life of the run directory.
        incarnation: rises by one with every start from a checkpoint.
        queue_endpoints: ZeroMQ addresses of the brokers, by shard. sync_endpoint: that of the publisher.
        rendezvous: init method of the learner ranks' store (``file://`` or ``tcp://host:port``).
        model_dir: Hugging Face folder that both sides load.
        generator_device, learner_device: ``cpu`` or ``cuda``.
        checkpoint: folder of the checkpoint to start from; empty for a fresh run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    run_id: str
    incarnation: int
    queue_endpoints: tuple[str, ...]
    sync_endpoint: str
    rendezvous: str
    model_dir: str
    generator_device: str
    learner_device: str
    checkpoint: str = ""


class RunDir:
    """Paths of one run, and its two small files.

    Example:
        >>> RunDir("runs/a").metrics.name
        'metrics.jsonl'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.config_file = self.path / "config.json"
        self.facts_file = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.ending = self.path / "ending.json"
        self.dead_letter = self.path / "dead_letter.jsonl"
        self.bad_rows = self.path / "bad_rows.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.export = self.path / "export"
        self.weights = self.path / "weights"
        self.queue = self.path / "queue"

    def read_config(self) -> Config:
        """The resolved options."""
        return Config.model_validate_json(self._read(self.config_file))

    def read_facts(self) -> RunFacts:
        """The facts of the current start."""
        return RunFacts.model_validate_json(self._read(self.facts_file))

    def write_config(self, config: Config) -> None:
        """Writes the resolved options."""
        write_atomic(self.config_file, config.model_dump_json(indent=1))

    def write_facts(self, facts: RunFacts) -> None:
        """Writes the facts of this start."""
        write_atomic(self.facts_file, facts.model_dump_json(indent=1))

    def lock(self) -> None:
        """Keeps every other start out of this directory for as long as this process lives.

        Raises:
            DataError: another process holds it.
        """
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{self.path} is in use by another process: stop it first, or name another run_dir") from error

    def latest_checkpoint(self) -> Path | None:
        """The newest checkpoint whose manifest was written, or None."""
        return max(self._done_checkpoints(), default=None)

    def oldest_checkpoint(self) -> Path | None:
        """The oldest checkpoint that is still there, or None."""
        return min(self._done_checkpoints(), default=None)

    def _done_checkpoints(self) -> list[Path]:
        return [path.parent for path in self.checkpoints.glob("step-*/manifest.json")]

    def _read(self, file: Path) -> str:
        if not file.is_file():
            raise DataError(f"{self.path} is not a run directory: {file.name} is missing")
        return file.read_text()


def write_atomic(file: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text if text.endswith("\n") else text + "\n")
    os.replace(temporary, file)
