"""Optimizer steps of the FSDP2 engine on one rank, with and without shared prompts, against a bare loop on the same packed tokens.

``python -m benchmarks.learner_steps MODEL_DIR REPEATS`` prints one JSON object. The bare loop is forward, loss, backward, AdamW of
the unwrapped model: the packs, their masks and the places of the sampled tokens are made before its clock starts, only sampled
positions go through its head, and its loss is a plain policy gradient. Sides take turns. Tokens that are computed are counted at the
input of the embedding in a step that is not timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from asyncrl.config import Config
from asyncrl.config.compose import compose
from asyncrl.learner.batch import Batch
from asyncrl.learner.engine import Engine, EngineSpec
from asyncrl.learner.objective import PolicyObjective, loss_settings
from asyncrl.learner.packing import attention_mask, pack
from asyncrl.learner.registry import EngineRegistry
from asyncrl.trajectory import TrajectoryGroup
from benchmarks.learner_data import arithmetic_groups, batch_of, distinct_tokens, rows_of

__all__ = ["Steps", "bare_loop", "engine_step", "measure", "new_engine"]

RECIPE = "arithmetic"
NUM_GROUPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What was measured: seconds of a step by repeat, and counts of tokens in one step.

    ``computed`` and ``distinct`` of the shared form; ``padding``: computed without sharing, less the tokens of all trajectories.
    """

    engine_s: list[float]
    bare_s: list[float]
    unshared_s: list[float]
    trained: int
    groups: int
    computed: int
    distinct: int
    padding: int


def new_engine(config: Config, model_dir: str, **learner: Any) -> Engine:
    """An initialized FSDP2 engine on the CPU in float32."""
    settings = config.learner.model_copy(update=learner)
    kind = EngineRegistry.find(model_type="language_model", backend="fsdp2", device="cpu")
    engine = kind(EngineSpec(model_dir=model_dir, dtype="float32", device="cpu", learner=settings))
    engine.initialize()
    return engine


def engine_step(engine: Engine, config: Config, batch: Batch) -> Callable[[], Any]:
    """One whole ``train_batch``: packing, forward, loss, backward, clipping, AdamW."""
    objective = PolicyObjective(loss_settings(config.algorithm), "behavior")
    return lambda: engine.train_batch(
        batch, objective, should_stop=lambda: False, rescale=lambda sums: objective.rescale(sums, batch.denominators)
    )


def bare_loop(config: Config, model_dir: str, groups: Sequence[TrajectoryGroup]) -> Callable[[], None]:
    """One optimizer step of the unwrapped model over the packs that the engine makes of these groups."""
    from transformers import AutoModelForCausalLM

    settings = config.learner
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation=settings.attention).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    micros = pack(rows_of(groups), cap_tokens=settings.micro_batch_tokens, shared_prompt=True)
    masks = [attention_mask(micro, additive=None) for micro in micros]
    tokens = sum(len(micro.targets) for micro in micros)

    def step() -> None:
        for micro, mask in zip(micros, masks, strict=True):
            output = model.model(input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=mask, use_cache=False)
            logits = model.lm_head(output.last_hidden_state[0, micro.sources])
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, micro.targets[:, None])[:, 0]
            (-(micro.advantages * logprobs).sum() / tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(config: Config, model_dir: str, groups: Sequence[TrajectoryGroup], repeats: int) -> Steps:
    """Counts in a first step of each side, then times ``repeats`` steps of each in turn."""
    batch = batch_of(groups, groups, None)
    shared = engine_step(new_engine(config, model_dir), config, batch)
    unshared = engine_step(new_engine(config, model_dir, shared_prompt=False), config, batch)
    bare = bare_loop(config, model_dir, groups)
    with _counting() as computed:
        shared()
    with _counting() as computed_unshared:
        unshared()
    bare()
    times: list[list[float]] = [[], [], []]
    for _ in range(repeats):
        for side, step in enumerate((shared, bare, unshared)):
            started_s = time.perf_counter()
            step()
            times[side].append(time.perf_counter() - started_s)
    rows = rows_of(groups)
    return Steps(
        engine_s=times[0],
        bare_s=times[1],
        unshared_s=times[2],
        trained=sum(row.trajectory.num_sampled_tokens for row in rows),
        groups=len(groups),
        computed=sum(computed),
        distinct=distinct_tokens(groups),
        padding=sum(computed_unshared) - sum(len(row.trajectory) for row in rows),
    )


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Collects the number of token ids that enter an embedding."""
    counts: list[int] = []

    def count(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, torch.nn.Embedding):
            counts.append(inputs[0].numel())

    hook = register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        hook.remove()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("repeats", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = compose([f"recipe={RECIPE}"])
    with tempfile.NamedTemporaryFile() as meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting.name}", rank=0, world_size=1)
        steps = measure(config, options.model_dir, arithmetic_groups(config, options.model_dir, NUM_GROUPS), options.repeats)
        dist.destroy_process_group()
    print(json.dumps(asdict(steps)), flush=True)


if __name__ == "__main__":
    main()
