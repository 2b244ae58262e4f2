"""Typed, validated options. Loads without torch, ray, vllm or zmq."""

from asyncrl.config.schema import (
    AlgorithmConfig,
    Config,
    GeneratorConfig,
    LaunchConfig,
    LearnerConfig,
    ModelConfig,
    MonitorConfig,
    QueueConfig,
    SyncConfig,
    TaskConfig,
)

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
