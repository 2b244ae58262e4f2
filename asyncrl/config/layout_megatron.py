"""Rules of ``learner.engine=megatron``: data × tensor × pipeline × context parallel, and expert parallel across all but the pipeline.

What divides what, with R ranks, t tensor, p pipeline, v virtual pipeline, c context and e expert parallel::

    R              a multiple of t·p·c
    R / p          a multiple of e: whole experts are dealt to the ranks of a stage
    layers         a multiple of p·v
    heads, inner size, vocabulary     multiples of t; key/value heads a multiple or a divisor
    experts        a multiple of e
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncrl.config.description import dealt, experts_of, heads_of
from asyncrl.config.model_megatron import check_built
from asyncrl.config.ranks import Layout, divisor, multiple
from asyncrl.errors import ConfigError

__all__ = ["check_megatron", "check_megatron_model"]


def check_megatron(layout: Layout) -> None:
    """Rules between the numbers.

    Raises:
        ConfigError: ranks that do not divide, or chunks without stages, with the numbers that would do.
    """
    tensor, stages, context = layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel
    if layout.virtual_pipeline > 1 and stages == 1:
        raise ConfigError(
            f"learner.virtual_pipeline interleaves the chunks of several stages; met {layout.virtual_pipeline} "
            "with learner.pipeline_parallel=1: set learner.virtual_pipeline=1, or learner.pipeline_parallel=2 or more"
        )
    if layout.ranks % layout.replica_ranks:
        raise ConfigError(
            "learner.ranks is a multiple of learner.tensor_parallel × learner.pipeline_parallel × learner.context_parallel; "
            f"met {layout.ranks} and {tensor} × {stages} × {context}: set learner.ranks={multiple(layout.ranks, layout.replica_ranks)}"
        )
    stage = layout.ranks // stages
    if stage % layout.expert_parallel:
        whole = math.lcm(layout.replica_ranks, stages * layout.expert_parallel)
        raise ConfigError(
            f"learner.expert_parallel divides the {stage} ranks of a stage; met {layout.expert_parallel}: "
            f"set learner.expert_parallel={divisor(stage, layout.expert_parallel)}, or learner.ranks={multiple(layout.ranks, whole)}"
        )


def check_megatron_model(layout: Layout, text: Mapping[str, Any]) -> None:
    """Rules between a layout and a model's ``config.json``, which describes a language model and nothing around it.

    Raises:
        UnsupportedError: a model that is not built.
        ConfigError: layers, heads, sizes or experts that cannot be dealt to the ranks, with the sizes that can.
    """
    check_built(text)
    _check_layers(layout, int(text.get("num_hidden_layers") or 0))
    _check_tensor(layout.tensor_parallel, text)
    _check_experts(layout, experts_of(text))


def _check_layers(layout: Layout, layers: int) -> None:
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline
    if layers % (stages * chunks):
        fits = [n for n in range(1, layers + 1) if layers % (n * chunks) == 0]
        raise ConfigError(
            f"learner.pipeline_parallel × learner.virtual_pipeline deals the model's {layers} layers evenly; met {stages} × {chunks}: "
            + (f"set learner.pipeline_parallel={max(n for n in fits if n <= stages)}" if fits else "set learner.virtual_pipeline=1")
        )


def _check_tensor(tensor: int, text: Mapping[str, Any]) -> None:
    if tensor == 1:
        return
    heads, pairs = heads_of(text, f"learner.tensor_parallel={tensor}")
    sizes = {"attention heads": heads}
    inner = () if experts_of(text) else ("intermediate_size",)  # experts are not cut
    sizes |= {name: int(text[name]) for name in (*inner, "vocab_size") if text.get(name)}
    head = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    sizes["rows of queries, keys and values"] = (heads + 2 * pairs) * head  # cut evenly also where a key/value head serves several ranks
    uneven = [f"{size} {name}" for name, size in sizes.items() if size % tensor]
    uneven += [] if dealt(pairs, tensor) else [f"{pairs} key/value heads"]
    if uneven:
        fits = [n for n in range(1, heads + 1) if dealt(pairs, n) and all(size % n == 0 for size in sizes.values())]
        raise ConfigError(
            f"learner.tensor_parallel divides heads, inner size and vocabulary evenly; met {tensor} and {', '.join(uneven)}: "
            f"set it to {' or '.join(map(str, fits))}"
        )


def _check_experts(layout: Layout, experts: int) -> None:
    size = layout.expert_parallel
    if size > 1 and not experts:
        raise ConfigError(f"learner.expert_parallel deals experts to ranks, and the model has none; met {size}: set it to 1")
    if experts % size:
        fits = [n for n in range(1, experts + 1) if experts % n == 0]
        raise ConfigError(
            f"learner.expert_parallel deals the model's {experts} experts evenly; met {size}: set it to {' or '.join(map(str, fits))}"
        )
