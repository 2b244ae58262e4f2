"""The FSDP2 engines: a causal language model and a value model, alike in everything but what they predict."""

from __future__ import annotations

import torch

from asyncrl.config.engine_options import LEFT_OUT
from asyncrl.config.layout_fsdp2 import LORA_TENSOR, MOE_TENSOR, SHARDS_TENSOR, TENSOR_SEQUENCE
from asyncrl.config.refusals import ROUTER_REPLAY, TURNS_ON_ONE_GPU
from asyncrl.learner.batch import LossFunction, MicroBatch
from asyncrl.learner.capabilities import Capabilities
from asyncrl.learner.fsdp2_base import FSDP2Base
from asyncrl.learner.hf_model import load_model, load_value_model
from asyncrl.learner.packed import PackedModel
from asyncrl.learner.registry import EngineRegistry
from asyncrl.learner.scoring import Scorer, chunk_tokens_of
from asyncrl.learner.valuing import Valuer

__all__ = ["FSDP2Engine", "FSDP2ValueEngine"]


def _capabilities(model: str) -> Capabilities:
    return Capabilities(
        models=f"any Hugging Face {model} that declares its decoder layers and on which packing is exact",
        layouts=(
            "data parallel",
            "HSDP",
            "Ulysses sequence parallel × data parallel",
            "tensor parallel × data parallel, dense models that declare a plan",
            "CPU offload",
            "activation checkpointing",
            "LoRA",
        ),
        refused=(
            TENSOR_SEQUENCE,
            SHARDS_TENSOR,
            LORA_TENSOR,
            MOE_TENSOR,
            *LEFT_OUT["fsdp2"].values(),
            ROUTER_REPLAY,
            TURNS_ON_ONE_GPU,
        ),
    )


@EngineRegistry.register(model_type="language_model", backend="fsdp2", devices=("cpu", "cuda"))
class FSDP2Engine(FSDP2Base):
    """A causal language model: log-probs of the sampled tokens, and entropies."""

    capabilities = _capabilities("causal language model")

    def _load(self) -> PackedModel:
        settings = self.spec.learner
        model = load_model(self.spec.model_dir, settings.attention)
        return Scorer(
            model,
            attention=settings.attention,
            chunk_tokens=chunk_tokens_of(model, settings.logits_chunk_mib),
            compute_dtype=torch.float32,
            router_loss=settings.router_loss > 0,
        )

    def _predict(self, micro: MicroBatch, loss: LossFunction) -> tuple[torch.Tensor, ...]:
        predictions: tuple[torch.Tensor, ...] = self.packed(micro, loss.entropy_gradient)
        return predictions


@EngineRegistry.register(model_type="value_model", backend="fsdp2", devices=("cpu", "cuda"))
class FSDP2ValueEngine(FSDP2Base):
    """A decoder under a value head: the return expected before each sampled token."""

    capabilities = _capabilities("decoder under a head of one number")

    def _load(self) -> PackedModel:
        settings = self.spec.learner
        return Valuer(
            load_value_model(self.spec.model_dir, settings.attention),
            attention=settings.attention,
            compute_dtype=torch.float32,
            router_loss=settings.router_loss > 0,
        )

    def _predict(self, micro: MicroBatch, loss: LossFunction) -> tuple[torch.Tensor, ...]:
        predictions: tuple[torch.Tensor, ...] = self.packed(micro)
        return predictions
