"""From a model folder and options to this rank's part of an engine: rules, groups, layers, weights, gradient buffers, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.config.engine_options import check_engine_options, check_interleaved
from asyncrl.config.layout import Layout, check_layout, check_model_layout, check_router_loss
from asyncrl.learner.engine import EngineSpec
from asyncrl.learner.hf_model import refuse_windows
from asyncrl.learner.megatron.attention import PackedAttention
from asyncrl.learner.megatron.decode import Shares
from asyncrl.learner.megatron.hf_config import read_config, transformer_config
from asyncrl.learner.megatron.masters import Masters
from asyncrl.learner.megatron.model import build_chunks
from asyncrl.learner.megatron.parallel import MegatronLayout, Parallel, start_parallel
from asyncrl.learner.megatron.router import RouterLogits
from asyncrl.learner.megatron.standins import check_device
from asyncrl.learner.megatron.updates import new_optimizer, replicated
from asyncrl.learner.megatron.weights import load_weights

__all__ = ["Built", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """This rank's part of a model.

    Attributes:
        config: the folder's, as transformers reads it; parallel: this rank's place; shares: how its stage divides tokens.
        chunks: replicated where the model is trained; optimizer: theirs, None where it is not.
        router: what routers say where their loss is wanted, else None.
    """

    config: Any
    parallel: Parallel
    shares: Shares
    chunks: list[Any]
    optimizer: Any
    router: RouterLogits | None


def build(spec: EngineSpec, *, device: torch.device, dtype: torch.dtype, value: bool) -> Built:
    """Checks the options against ranks and model, and builds; collective.

    Raises:
        ConfigError, UnsupportedError: what cannot be dealt to the ranks, or is not built.
    """
    check_device(device)
    settings = spec.learner
    check_engine_options(settings)
    if device.type == "cuda":  # learner.device=auto says so only now
        check_interleaved(settings)
    layout = replace(Layout.of(settings), ranks=dist.get_world_size())
    check_layout(layout)
    config = read_config(spec.model_dir)
    refuse_windows(config, settings.micro_batch_tokens)
    check_model_layout(layout, config.to_dict())
    check_router_loss(settings.router_loss, config.to_dict())
    parallel = start_parallel(MegatronLayout.of(settings, layout.ranks))
    core = transformer_config(config, parallel.layout, dtype=dtype, recompute=settings.activation_checkpointing)
    chunks = build_chunks(config, core, parallel, attention=PackedAttention, value_head=value)
    load_weights(chunks, spec.model_dir, config, parallel, value_head=value)
    whole = [(p, p.detach().clone()) for c in chunks for p in c.parameters()] if spec.trained and dtype is not torch.float32 else []
    for chunk in chunks:
        chunk.to(device=device, dtype=dtype)
        chunk.requires_grad_(spec.trained)
    replicas = replicated(chunks) if spec.trained else chunks
    optimizer = new_optimizer(replicas, settings, dtype) if spec.trained else None
    for parameter, weight in whole:  # the optimizer begins with what was read, not with what the chunks keep of it
        Masters(optimizer).start(parameter, weight)
    return Built(
        config=config,
        parallel=parallel,
        shares=Shares.of_this_rank(),
        chunks=replicas,
        optimizer=optimizer,
        router=RouterLogits(chunks) if settings.router_loss else None,
    )
