"""Where the results of a run's pool go: weights to the publisher, metrics to the run directory, checkpoints beside them."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.learner.checkpoint import CheckpointWriter, Manifest, package_versions
from asyncrl.learner.control import Control
from asyncrl.learner.engine import Engine
from asyncrl.monitor.writer import MetricsWriter
from asyncrl.queue.messages import Frontier
from asyncrl.sync.publisher import Publisher

__all__ = ["RunOutlets"]

log = logging.getLogger(__name__)


class RunOutlets:
    """The outlets of one rank; publisher and metrics live on the leader alone.

    Args:
        config, facts, run_dir: of the run; engine, control: of this rank; step: training steps in the starting weights.
    """

    def __init__(self, config: Config, facts: RunFacts, run_dir: RunDir, engine: Engine, control: Control, step: int) -> None:
        self._config = config
        self._facts = facts
        self._run_dir = run_dir
        self._engine = engine
        self._control = control
        self._checkpoints = CheckpointWriter(engine, control, run_dir, config.launch.keep_checkpoints)
        first = control.is_leader
        self._publisher = Publisher(config, facts, run_dir) if first else None
        self._writer = MetricsWriter(run_dir, config.monitor.tensorboard, step) if first else None

    def publish(self, version: int) -> None:
        """See :class:`~asyncrl.learner.pool.Outlets`."""
        started_s = time.monotonic()
        if self._publisher is not None:
            self._publisher.publish(version, self._engine.named_tensors(), self._engine.ties())
            log.info("published version %d in %.2f s", version, time.monotonic() - started_s)
        else:
            deque(self._engine.named_tensors(), maxlen=0)  # gathering is collective: every rank takes part

    def metrics(self, values: dict[str, Any]) -> None:
        """See :class:`~asyncrl.learner.pool.Outlets`."""
        if self._writer is not None:
            self._writer.write(values)

    def checkpoint(self, step: int, frontier: Frontier | None, synced: bool = True) -> None:
        """See :class:`~asyncrl.learner.pool.Outlets`."""
        manifest = Manifest(
            run_id=self._facts.run_id,
            step=step,
            incarnation=self._facts.incarnation,
            frontier=frontier or Frontier(steps=step, low=0, settled_above=(), trained=0, dropped={}),
            engine=self._config.learner.engine,
            world_size=self._control.world_size,
            dtype=self._config.model.dtype,
            versions=package_versions(),
        )
        self._checkpoints.begin(manifest, synced)

    def finish_checkpoint(self, *, wait: bool) -> int | None:
        """See :class:`~asyncrl.learner.pool.Outlets`."""
        if self._checkpoints.finish(wait=wait) is None:
            return None
        oldest = self._run_dir.oldest_checkpoint()
        return None if oldest is None else int(oldest.name.removeprefix("step-"))

    def sync_s(self) -> float:
        """See :class:`~asyncrl.learner.pool.Outlets`."""
        return self._publisher.last_sync_s if self._publisher is not None else 0.0

    def close(self) -> None:
        """Ends the publisher's thread and closes the files."""
        if self._publisher is not None:
            self._publisher.close()
        if self._writer is not None:
            self._writer.close()
