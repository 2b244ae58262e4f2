"""Megatron-core as an engine: layouts, models, weights and checkpoints under it."""
