"""The Megatron engines: a causal language model and a value model, alike in everything but what they predict."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.config.engine_options import INTERLEAVED_TWO, LEFT_OUT, ROUTER_LOSS_PIPELINE, ROUTER_LOSS_RECOMPUTED
from asyncrl.config.model_megatron import FAMILIES, MODELS
from asyncrl.config.refusals import ROUTER_REPLAY, TURNS_ON_ONE_GPU
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.capabilities import Capabilities
from asyncrl.learner.megatron.base import MegatronBase
from asyncrl.learner.megatron.vocabulary import tempered_logprobs
from asyncrl.learner.registry import EngineRegistry

__all__ = ["MegatronEngine", "MegatronValueEngine"]


def _capabilities(model: str) -> Capabilities:
    return Capabilities(
        models=f"{', '.join(FAMILIES)}: {model}",
        layouts=(
            "data parallel, with a distributed optimizer",
            "tensor parallel × data parallel, activations between the matrices cut by position",
            "pipeline parallel × data parallel, 1F1B",
            "tensor parallel × pipeline parallel",
            "interleaved pipeline parallel, of two stages on a CPU alone",
            "context parallel",
            "expert parallel × tensor parallel",
            "activation checkpointing",
        ),
        refused=(
            *LEFT_OUT["megatron"].values(),
            MODELS,
            INTERLEAVED_TWO,
            ROUTER_LOSS_PIPELINE,
            ROUTER_LOSS_RECOMPUTED,
            ROUTER_REPLAY,
            TURNS_ON_ONE_GPU,
        ),
    )


@EngineRegistry.register(model_type="language_model", backend="megatron", devices=("cpu", "cuda"))
class MegatronEngine(MegatronBase):
    """A causal language model: log-probs of the sampled tokens, and entropies."""

    capabilities = _capabilities("causal language models")
    value = False

    def _predict(self, chunk: Any, hidden: torch.Tensor, micro: MicroBatch, *, entropy_gradient: bool) -> tuple[torch.Tensor, ...]:
        tied = chunk.share_embeddings_and_output_weights
        weight = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
        predicting, own = self.shares.predicting(hidden, micro, divided_head=True)
        predictions = tempered_logprobs(
            predicting,
            weight,
            micro.targets[own],
            micro.temperatures[own],
            group=self.shares.tensor,
            chunk_tokens=max(1, int(self.spec.learner.logits_chunk_mib * 2**20 / (4 * len(weight)))),
            entropy_gradient=entropy_gradient,
        )
        return tuple(self.shares.collect(values, own, micro) for values in predictions)


@EngineRegistry.register(model_type="value_model", backend="megatron", devices=("cpu", "cuda"))
class MegatronValueEngine(MegatronBase):
    """A decoder under a value head: the return expected before each sampled token."""

    capabilities = _capabilities("decoders under a head of one number")
    value = True

    def _predict(self, chunk: Any, hidden: torch.Tensor, micro: MicroBatch, *, entropy_gradient: bool) -> tuple[torch.Tensor, ...]:
        predicting, own = self.shares.predicting(hidden, micro, divided_head=False)
        return (self.shares.collect(chunk.output_layer(predicting).float().sum(-1), own, micro),)
