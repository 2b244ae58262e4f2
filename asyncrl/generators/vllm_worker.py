"""Runs inside the vLLM worker process: opens an update by itself and loads it into the model.

Mixed into the worker class by ``worker_extension_cls``; its method is called through ``collective_rpc`` while generation is
paused. What goes through the call is the manifest; the tensors are views of the transport's memory.

Source: engine notes, "Weight update on a live engine".
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from asyncrl.sync.messages import TensorSpec, UpdateManifest
from asyncrl.sync.transports import open_update

__all__ = ["WeightLoader"]


def _worth_telling(record: logging.LogRecord) -> bool:
    """Rotary embeddings have no weights in a checkpoint, and a tied output head is rebuilt below; anything else not loaded is news."""
    return not record.getMessage().startswith(("RotaryEmbedding: Failed", "ParallelLMHead: Failed"))


logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_worth_telling)


class WeightLoader:
    """Worker extension with one remote call."""

    model_runner: Any

    def asyncrl_load_update(self, encoded: bytes) -> int:
        """Loads the update of a msgpack-encoded manifest and returns its version.

        The packed copy of an output head is rebuilt by hand: the layer-wise reload leaves it stale when the head is tied.
        """
        manifest = msgspec.msgpack.decode(encoded, type=UpdateManifest)
        with open_update(manifest) as tensors:
            self.model_runner.reload_weights(weights_iterator=((spec.name, _tensor(spec, view)) for spec, view in tensors))
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
        return manifest.version


def _tensor(spec: TensorSpec, view: memoryview) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(view, dtype=torch.uint8).view(dtype).view(spec.shape)
