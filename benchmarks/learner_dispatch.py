"""One optimizer step of a long-tailed batch over two ranks: dealt by the plan's balance, and round robin.

``python -m benchmarks.learner_dispatch REPEATS`` prints one JSON object. The model is random and small, so that responses of a
thousand tokens take no minutes; each rank has one thread. A step's time is that of the slower rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from asyncrl.config import Config
from asyncrl.learner.cost import analytic_ratio
from asyncrl.learner.plan import PlanSettings, plan_step
from asyncrl.trajectory import TrajectoryGroup
from benchmarks.learner_data import batch_of, long_tailed_groups
from benchmarks.learner_steps import engine_step, new_engine

__all__ = ["balanced", "round_robin"]

RANKS = 2
NUM_GROUPS, GROUP_SIZE, LONGEST = 24, 4, 960
VOCABULARY, HIDDEN = 2048, 256
QUADRATIC = analytic_ratio(HIDDEN)


def balanced(groups: Sequence[TrajectoryGroup], ranks: int) -> list[list[TrajectoryGroup]]:
    """Groups of each rank as the learner plans them."""
    settings = PlanSettings(replicas=ranks, mini_batches=1, keep_no_signal=True, shared_prompt=True, quadratic=QUADRATIC)
    (mini,) = plan_step(0, [group.meta() for group in groups], settings, recompute=False).mini_batches
    by_ticket = {group.ticket: group for group in groups}
    return [[by_ticket[ticket] for ticket in tickets] for tickets in mini.tickets_by_replica]


def round_robin(groups: Sequence[TrajectoryGroup], ranks: int) -> list[list[TrajectoryGroup]]:
    """Group i on rank i modulo ``ranks``."""
    return [list(groups[rank::ranks]) for rank in range(ranks)]


def _rank(rank: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    config = Config.model_validate({"learner": {"ranks": RANKS, "micro_batch_tokens": 1024}})
    groups = long_tailed_groups(NUM_GROUPS, GROUP_SIZE, vocabulary=VOCABULARY, longest=LONGEST)
    engine = new_engine(config, f"{folder}/model")
    steps = [engine_step(engine, config, batch_of(deal(groups, RANKS)[rank], groups, QUADRATIC)) for deal in (balanced, round_robin)]
    times: list[list[float]] = [[], []]
    for repeat in range(repeats + 1):
        for side, step in enumerate(steps):
            seconds = _slowest(step)
            if repeat:  # the first of each warms up
                times[side].append(seconds)
    if rank == 0:
        print(json.dumps({"balanced_s": times[0], "round_robin_s": times[1]}), flush=True)
    dist.destroy_process_group()


def _slowest(step: Callable[[], Any]) -> float:
    dist.barrier()
    started_s = time.perf_counter()
    step()
    seconds = torch.tensor([time.perf_counter() - started_s], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _save_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("repeats", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        _save_model(Path(folder) / "model")
        mp.spawn(_rank, args=(folder, options.repeats), nprocs=RANKS, join=True)


if __name__ == "__main__":
    main()
