"""A Hugging Face decoder that runs on packs: hidden states of the positions that predict a sampled token, nothing else leaves it.

Wrapping the whole model in one module lets FSDP's root hooks gather embedding, final norm and head for the whole pass. Where a
replica has several ranks, each computes those three for its slice of the tokens alone, and all of them end with what all predict.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncrl.errors import UnsupportedError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.meshes import Meshes
from asyncrl.learner.packing import attention_mask
from asyncrl.learner.router import balance_loss
from asyncrl.learner.slices import Slices, cut, join, spread

__all__ = ["Decoded", "PackedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """``hidden``: [k, H] at the sources of this rank; ``own``: int64 [k], which of the K sampled tokens they predict (None: all);
    ``router``: this rank's part of the load-balancing loss, summed over rows; 0.0 where none is asked for."""

    hidden: torch.Tensor
    own: torch.Tensor | None
    slices: Slices | None
    router: torch.Tensor


class PackedModel(nn.Module, abc.ABC):
    """Packed tokens → hidden states.

    Args:
        model: the Hugging Face model; its attention implementation is ``sdpa`` or ``eager``.
        attention: which of the two.
        compute_dtype: precision of the forward pass.
        router_loss: whether the load-balancing loss of a mixture of experts is wanted.
    """

    def __init__(self, model: Any, *, attention: str, compute_dtype: torch.dtype, router_loss: bool) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.compute_dtype = compute_dtype
        self.router_loss = router_loss
        self._meshes: Meshes | None = None
        self._slices: Slices | None = None

    def divide(self, meshes: Meshes) -> None:
        """From now on each rank of a replica computes its slice; the model's layers are divided already."""
        if meshes.replica is None:
            return
        self._meshes = meshes
        if meshes.shares == "matrices":
            self._final_norm().register_forward_pre_hook(self._cut_before_norm)

    def decode(self, micro: MicroBatch) -> Decoded:
        """Runs the decoder on a pack."""
        mask = attention_mask(micro, additive=self.compute_dtype if self.attention == "eager" else None)
        if self._meshes is None:
            output = self._decoder(mask, input_ids=micro.input_ids, position_ids=micro.position_ids)
            hidden = output.last_hidden_state[0].index_select(0, micro.sources)
            return Decoded(hidden=hidden, own=None, slices=None, router=self._router(output, micro, None))
        assert self._meshes.replica_group is not None
        self._slices = slices = Slices.of(len(micro), self._meshes.replica_group)
        output = self._decode_slice(micro, mask, slices)
        own = torch.nonzero((micro.sources >= slices.start) & (micro.sources < slices.stop))[:, 0]
        hidden = output.last_hidden_state[0].index_select(0, micro.sources[own] - slices.start)
        return Decoded(hidden=hidden, own=own, slices=slices, router=self._router(output, micro, slices))

    @abc.abstractmethod
    def predict(self, micro: MicroBatch) -> torch.Tensor:
        """What the model is for: float32 [K], one number for each sampled token."""

    @staticmethod
    @abc.abstractmethod
    def alone(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The same of the model's own output: [T] of logits [T, V or 1] and the tokens [T] that they predict."""

    @staticmethod
    def collect(values: torch.Tensor, decoded: Decoded, micro: MicroBatch) -> torch.Tensor:
        """[K] on every rank of the replica, from this rank's [k]."""
        if decoded.slices is None or decoded.own is None:
            return values
        return spread(values, decoded.own, len(micro.targets), decoded.slices.group)

    def _decoder(self, mask: torch.Tensor, **inputs: torch.Tensor) -> Any:
        wanted = {"output_router_logits": True} if self.router_loss else {}
        return self.model.get_decoder()(attention_mask=mask, use_cache=False, **inputs, **wanted)

    def _decode_slice(self, micro: MicroBatch, mask: torch.Tensor, slices: Slices) -> Any:
        assert self._meshes is not None
        own = slice(slices.start, slices.stop)
        if self._meshes.shares == "tokens":
            return self._decoder(mask, input_ids=micro.input_ids[:, own], position_ids=micro.position_ids[:, own])
        embedded = self.model.get_input_embeddings()(micro.input_ids[0, own])
        return self._decoder(mask, inputs_embeds=join(embedded, slices)[None], position_ids=micro.position_ids)

    def _router(self, output: Any, micro: MicroBatch, slices: Slices | None) -> torch.Tensor:
        if not self.router_loss:
            return torch.zeros((), device=micro.segments.device)
        return balance_loss(output.router_logits, self.model.config.num_experts_per_tok, micro, slices)

    def _cut_before_norm(self, module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert self._slices is not None
        return cut(arguments[0][0], self._slices)[None], *arguments[1:]

    def _final_norm(self) -> nn.Module:
        decoder = self.model.get_decoder()
        norm = getattr(decoder, "norm", None)
        others = {name.split(".")[0] for name, _ in decoder.named_parameters()} - {"layers", "embed_tokens", "norm"}
        if not isinstance(norm, nn.Module) or others:
            raise UnsupportedError(
                f"learner.tensor_parallel wants a decoder of embed_tokens, layers and norm; {type(decoder).__name__} "
                + (f"has {', '.join(sorted(others))} too" if others else "has no norm")
            )
        return norm
