"""Settings that would do nothing, given the others: refused when the user wrote them, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

__all__ = ["RULES", "check_effects"]


class Rule(NamedTuple):
    """``option`` is without effect where ``idle`` holds."""

    option: str
    idle: Callable[[Config], bool]
    reason: str


def _one_update(config: Config) -> bool:
    return config.algorithm.mini_batches * config.algorithm.epochs == 1


def _ratio_is_one(config: Config) -> bool:
    return config.algorithm.proximal == "recompute" and _one_update(config)


RULES = (
    Rule("algorithm.clip_low", _ratio_is_one, "proximal=recompute with one update per batch has ratio 1, so clipping cannot act"),
    Rule("algorithm.clip_high", _ratio_is_one, "proximal=recompute with one update per batch has ratio 1, so clipping cannot act"),
    Rule("algorithm.auto_staleness", lambda c: c.algorithm.proximal != "auto", "only algorithm.proximal=auto reads it"),
    Rule("algorithm.auto_drift", lambda c: c.algorithm.proximal != "auto", "only algorithm.proximal=auto reads it"),
    Rule("algorithm.correction_cap", lambda c: c.algorithm.correction == "off", "algorithm.correction is off"),
    Rule("algorithm.correction", lambda c: c.algorithm.proximal == "bypass", "proximal=bypass makes the correction weight 1"),
    Rule("algorithm.no_signal_budget_groups", lambda c: c.algorithm.no_signal == "keep", "algorithm.no_signal=keep replaces nothing"),
    Rule("queue.window", lambda c: c.queue.schedule == "lockstep", "lockstep trains in ticket order"),
    Rule("queue.last_batch", lambda c: c.task.epochs == 0, "task.epochs=0 has no last batch"),
    Rule("queue.port", lambda c: c.queue.transport == "ipc", "queue.transport=ipc uses no port"),
    Rule("queue.host", lambda c: c.queue.transport == "ipc", "queue.transport=ipc listens at no address"),
    Rule("queue.max_log_mib", lambda c: c.queue.durability == "memory", "queue.durability=memory writes no log"),
    Rule("queue.samples_per_insert", lambda c: c.queue.order == "fifo", "queue.order=fifo uses each group max_uses times"),
    Rule("queue.error_buffer", lambda c: c.queue.order == "fifo", "queue.order=fifo has no limiter"),
    Rule("queue.priority_exponent", lambda c: c.queue.order != "prioritised", "only queue.order=prioritised reads it"),
    Rule("sync.rolling", lambda c: c.generator.replicas == 1, "there is one replica"),
    Rule("sync.in_flight", lambda c: c.queue.schedule == "lockstep", "lockstep drains before every update"),
    Rule("task.path", lambda c: c.task.name not in ("jsonl", "parquet"), "task.name generates its prompts"),
    Rule("task.prompt_key", lambda c: c.task.name != "jsonl", "only task.name=jsonl reads it"),
    Rule("task.label_key", lambda c: c.task.name != "jsonl", "only task.name=jsonl reads it"),
    Rule("task.bad_rows", lambda c: c.task.name not in ("jsonl", "parquet"), "task.name generates its prompts"),
    Rule("task.dataset", lambda c: c.task.name != "reasoning_gym", "only task.name=reasoning_gym reads it"),
    Rule("task.dataset_args", lambda c: c.task.name != "reasoning_gym", "only task.name=reasoning_gym reads it"),
    Rule(
        "task.system", lambda c: c.task.name not in ("jsonl", "parquet") or bool(c.task.template), "only chat prompts take a system message"
    ),
    Rule("model.tied", lambda c: c.model.path != "builtin:tiny-qwen3", "only builtin:tiny-qwen3 is built here"),
    Rule("model.seed", lambda c: c.model.path != "builtin:tiny-qwen3", "only builtin:tiny-qwen3 has random weights"),
    Rule("generator.kv_cache_mib", lambda c: c.generator.device == "cuda", "a CUDA replica uses generator.gpu_memory_utilization"),
    Rule("generator.gpu_memory_utilization", lambda c: c.generator.device == "cpu", "a CPU replica uses generator.kv_cache_mib"),
    Rule("generator.num_gpus", lambda c: c.generator.device == "cpu", "generator.device is cpu"),
    Rule(
        "learner.attention",
        lambda c: c.learner.sequence_parallel > 1 and c.learner.attention != "sdpa",
        "learner.sequence_parallel computes attention with sdpa",
    ),
    Rule("learner.lora_alpha", lambda c: c.learner.lora_rank == 0, "learner.lora_rank=0 trains no adapters"),
    Rule("learner.offload", lambda c: c.learner.device == "cpu", "learner.device=cpu has everything in the host's memory"),
    Rule("learner.num_gpus", lambda c: c.learner.device == "cpu", "learner.device is cpu"),
    Rule("launch.ray_object_store_mib", lambda c: bool(c.launch.ray_address), "launch.ray_address joins a running cluster"),
)


def check_effects(config: Config, written: Iterable[str]) -> None:
    """Raises ConfigError for the options in ``written`` that would do nothing."""
    names = set(written)
    idle = [rule for rule in RULES if rule.option in names and rule.idle(config)]
    if idle:
        raise ConfigError("; ".join(f"{rule.option} has no effect: {rule.reason}" for rule in idle), options=[r.option for r in idle])
