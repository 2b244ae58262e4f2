"""A run with a checkpoint, from a real engine: what an export is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner_support import batch_of, one_rank, random_groups, rows_of, settings, spec

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.learner.checkpoint import CheckpointWriter, Manifest
from asyncrl.learner.control import Control
from asyncrl.learner.fsdp2 import FSDP2Engine
from asyncrl.learner.objective import PolicyObjective
from asyncrl.queue.messages import Frontier

LORA = {"lora_rank": 4, "lora_alpha": 12}


def trained_engine(model_dir: str, dtype: str = "float32", **learner: Any) -> FSDP2Engine:
    """On one rank in this process, after two steps that change every digit."""
    one_rank()
    engine = FSDP2Engine(spec(model_dir, dtype=dtype, **({"learning_rate": 0.02, "warmup_steps": 0} | learner)))
    engine.initialize()
    for seed in range(2):
        batch, objective = batch_of(rows_of(random_groups(4, 4, seed=seed))), PolicyObjective(settings(), "behavior")
        engine.train_batch(batch, objective, should_stop=lambda: False, rescale=lambda sums: 1.0)
    return engine


def run_with_checkpoint(folder: Path, engine: FSDP2Engine) -> RunDir:
    """A run directory in ``folder`` with the engine's options, model and one checkpoint."""
    run_dir = RunDir(folder / "run")
    run_dir.path.mkdir()
    run_dir.write_config(Config(learner=engine.spec.learner))
    facts = RunFacts(
        run_id="r",
        incarnation=0,
        queue_endpoints=(),
        sync_endpoint="",
        rendezvous="",
        model_dir=engine.spec.model_dir,
        generator_device="cpu",
        learner_device="cpu",
    )
    run_dir.write_facts(facts)
    frontier = Frontier(steps=2, low=8, settled_above=(), trained=8, dropped={})
    dtype = engine.spec.dtype
    manifest = Manifest(run_id="r", step=2, incarnation=0, frontier=frontier, engine="fsdp2", world_size=1, dtype=dtype, versions={})
    writer = CheckpointWriter(engine, Control(0, 1, 1.0), run_dir, 2)
    writer.begin(manifest)
    writer.finish(wait=True)
    return run_dir
