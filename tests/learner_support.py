"""Small real things for the learner's tests: trajectories with hand-set tokens, tiny models on disk, gloo ranks in processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from asyncrl.algorithms.losses import Denominators, LossSettings
from asyncrl.config import Config
from asyncrl.launch.start import free_port
from asyncrl.learner.batch import Batch, Row
from asyncrl.learner.engine import EngineSpec
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan

VOCABULARY = 64


def trajectory(prompt: list[int], response: list[int], *, group: str = "g0", sibling: int = 0, **fields: Any) -> Trajectory:
    """A trajectory whose response tokens are all sampled; behaviour log-probs default to −1."""
    size = len(prompt) + len(response)
    mask = [False] * len(prompt) + [True] * len(response)
    values: dict[str, Any] = {
        "ticket": int("".join(c for c in group if c.isdigit()) or 0),
        "reward": float(sibling),
        "temperature": 1.0,
        "loss_mask": mask,
        "version": 0,
        "behavior_logprobs": [-1.0 if sampled else 0.0 for sampled in mask],
    } | fields
    version = values.pop("version")
    return Trajectory.checked(
        group_id=group,
        attempt=0,
        sibling=sibling,
        sample=0,
        prompt_id=group,
        seed=0,
        incarnation=0,
        input_ids=[*prompt, *response],
        version_spans=[VersionSpan(min(len(prompt), size - 1), version)],
        finish_reason="stop",
        generator="generator-0",
        engine="fake",
        dispatched_s=0.0,
        finished_s=1.0,
        **values,
    )


def random_groups(num_groups: int, size: int, *, seed: int, longest: int = 6, version: int = 0) -> list[TrajectoryGroup]:
    """Groups of random tokens with ragged prompts and responses, rewards in {0, 1} that differ within a group."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        prompt = rng.integers(1, VOCABULARY, rng.integers(2, 6)).tolist()
        siblings = []
        for s in range(size):
            response = rng.integers(1, VOCABULARY, rng.integers(1, longest + 1)).tolist()
            behavior = [0.0] * len(prompt) + (-4.2 + 0.3 * rng.standard_normal(len(response))).tolist()
            siblings.append(
                trajectory(prompt, response, group=f"g{g}", sibling=s, reward=float(s % 2), behavior_logprobs=behavior, version=version)
            )
        groups.append(TrajectoryGroup(trajectories=tuple(siblings)))
    return groups


def rows_of(groups: list[TrajectoryGroup]) -> tuple[Row, ...]:
    """Rows with advantage ±1 by sibling parity."""
    return tuple(Row(trajectory=t, advantage=2.0 * (t.sibling % 2) - 1.0) for group in groups for t in group.trajectories)


def batch_of(rows: tuple[Row, ...], all_rows: tuple[Row, ...] | None = None) -> Batch:
    """A batch whose denominators count ``all_rows`` (this rank's rows by default)."""
    counted = rows if all_rows is None else all_rows
    tokens = sum(row.trajectory.num_sampled_tokens for row in counted)
    return Batch(rows_N=rows, denominators=Denominators(tokens=tokens, trajectories=len(counted)))


def settings(**fields: Any) -> LossSettings:
    """Loss settings, plain by default."""
    plain: dict[str, Any] = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "correction": "off",
        "correction_cap": 2.0,
        "aggregation": "token_mean",
        "entropy_bonus": 0.0,
    }
    return LossSettings(**(plain | fields))


def tiny_model_dir(folder: Path, *, tied: bool = False, seed: int = 0, kind: str = "qwen3", key_heads: int = 1) -> str:
    """A random two-layer model of 64 hidden units, saved once."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": key_heads,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**shared)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shared))
    model.float().save_pretrained(folder)
    return str(folder)


def spec(model_dir: str, *, dtype: str = "float32", **learner: Any) -> EngineSpec:
    """An engine on the CPU with small micro-batches and a visible learning rate."""
    options = {"learning_rate": 1e-3, "warmup_steps": 2, "micro_batch_tokens": 48} | learner
    config = Config.model_validate({"learner": options})
    return EngineSpec(model_dir=model_dir, dtype=dtype, device="cpu", learner=config.learner)


def run_ranks(world: int, work: Callable[..., None], *arguments: Any) -> None:
    """Runs ``work(rank, world, *arguments)`` in ``world`` processes over gloo; raises what a rank raised."""
    mp.spawn(_rank, args=(world, free_port(), work, arguments), nprocs=world, join=True)


def one_rank() -> None:
    """A gloo group of one in this process; opened once."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)


def _rank(rank: int, world: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        work(rank, world, *arguments)
    finally:
        dist.destroy_process_group()
