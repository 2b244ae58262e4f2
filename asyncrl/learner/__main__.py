"""``python -m asyncrl.learner RUN_DIR --rank R``: one rank of the learner, from the start of its process to its exit code.

Consumes the run directory's options and facts; produces what :mod:`asyncrl.learner.pool` does, and at the end the export.
SIGTERM and SIGINT ask for an orderly end (exit code 0); anything that ends it otherwise is the last line of its log (exit code 1).
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts, write_atomic

if TYPE_CHECKING:
    from asyncrl.learner.engine import Engine

log = logging.getLogger("asyncrl.learner")


class Version(logging.Filter):
    """Puts role, rank and version into each log line."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.version = 0

    def filter(self, record: logging.LogRecord) -> bool:
        record.who = f"learner-{self.rank} v{self.version}"
        return True


class StopSignal:
    """Remembers SIGTERM and SIGINT, and passes them on once somebody listens."""

    def __init__(self) -> None:
        self.received = False
        self._listener: Callable[[], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls ``listener`` on a signal, or at once if one has come already."""
        self._listener = listener
        if self.received:
            listener()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self._listener is not None:
            self._listener()


def main() -> int:
    """Runs one rank; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.learner")
    parser.add_argument("run_dir")
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    stop, version = StopSignal(), Version(options.rank)
    run_dir = RunDir(options.run_dir)
    config, facts = run_dir.read_config(), run_dir.read_facts()
    _log_to_stderr(config, version)
    try:
        _run(config, facts, run_dir, options.rank, stop, version)
    except Exception as error:  # the last line of the log says why, whatever it was
        log.debug("traceback", exc_info=True)
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


def _run(config: Config, facts: RunFacts, run_dir: RunDir, rank: int, stop: StopSignal, version: Version) -> None:
    from asyncrl.learner.control import Control
    from asyncrl.learner.cost_probe import pair_cost
    from asyncrl.learner.export import export_checkpoint
    from asyncrl.learner.outlets import RunOutlets
    from asyncrl.learner.pool import Ending, Pool
    from asyncrl.learner.source import BatchSource
    from asyncrl.learner.worker import TrainingWorker

    _open_group(config, facts, rank)
    control = Control(rank, config.learner.ranks, config.launch.stall_timeout_s)
    engine, step = _engine(config, facts)
    version.version = step
    log.info("ready at step %d on %s", step, facts.learner_device)
    if control.any(stop.received):
        return
    control.elect(engine.is_mp_source)
    outlets = RunOutlets(config, facts, run_dir, engine, control, step)
    quadratic = pair_cost(engine, control, config, facts.model_dir)
    source = BatchSource(config, facts, f"learner-{rank}") if engine.is_mp_source else None
    try:
        pool = Pool(
            config,
            TrainingWorker(engine, config.algorithm, config.launch.stall_timeout_s),
            control,
            source,
            outlets,
            step=step,
            run_start_s=run_dir.facts_file.stat().st_mtime,
            quadratic=quadratic,
            on_version=lambda number: setattr(version, "version", number),
        )
        stop.listen(pool.stop)
        ending = pool.run()
    finally:
        if source is not None:
            source.close()
        outlets.close()
    # a stop has its deadline: the checkpoint is what counts, `asyncrl export` makes the folder later
    if control.is_leader and config.launch.export and not stop.received and run_dir.latest_checkpoint() is not None:
        export_checkpoint(run_dir, run_dir.export)
        log.info("exported to %s", run_dir.export)
    if control.is_leader:
        outcome = "failed" if ending is Ending.ASKED else "finished"  # a driver that asked does not look here
        write_atomic(run_dir.ending, json.dumps({"outcome": outcome, "reason": ending.value, "step": pool.step}))
    control.barrier()


def _engine(config: Config, facts: RunFacts) -> tuple[Engine, int]:
    """The engine with its starting weights, and how many training steps they contain."""
    from asyncrl.learner.checkpoint import read_manifest
    from asyncrl.learner.engine import EngineSpec
    from asyncrl.learner.registry import EngineRegistry, vendor_of

    device = facts.learner_device
    kind = EngineRegistry.find(model_type="language_model", backend=config.learner.engine, device=device, vendor=vendor_of(device))
    engine = kind(EngineSpec(model_dir=facts.model_dir, dtype=config.model.dtype, device=facts.learner_device, learner=config.learner))
    log.info("loading %s", facts.model_dir)
    engine.initialize()
    if not facts.checkpoint:
        return engine, 0
    manifest = read_manifest(Path(facts.checkpoint))
    engine.load(Path(facts.checkpoint))
    return engine, manifest.step


def _open_group(config: Config, facts: RunFacts, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(config.learner.threads)
    cuda = facts.learner_device == "cuda"
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        # sums over duplicate indices would otherwise come out in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic: Any = torch.utils.deterministic  # whose attributes are made at run time
        deterministic.fill_uninitialized_memory = False
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=facts.rendezvous,
        rank=rank,
        world_size=config.learner.ranks,
        timeout=timedelta(seconds=config.launch.stall_timeout_s),
    )


def _log_to_stderr(config: Config, version: Version) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(version)
    handler.setFormatter(logging.Formatter("%(asctime)s %(who)s %(levelname)s %(message)s"))
    # torch writes a line for each tensor of a checkpoint, megatron-core what it found when it was imported
    for chatty in ("c10d-NullHandler-dcp_logger", "megatron"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.basicConfig(level=config.monitor.log_level.upper(), handlers=[handler])


if __name__ == "__main__":
    sys.exit(main())
