"""The little that the suite has to know of an engine beyond its protocol. Another engine adds one entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncrl.learner.optimizer import local

__all__ = ["ADAPTERS", "Adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Ways into an engine.

    Attributes:
        use_sgd: replaces the optimizer of an initialized engine by plain SGD; the schedule keeps the learning rate.
        weights: full float32 tensors under Hugging Face names; collective.
        low_rank: A of every layer that LoRA adapts, by the name of its weight; collective.
        gradient: this rank's part of the gradient of a named parameter.
        leak: lets every token see the packed sequence before its own, from now on.
    """

    use_sgd: Callable[[Any], None]
    weights: Callable[[Any], Iterator[tuple[str, torch.Tensor]]]
    low_rank: Callable[[Any], Iterator[tuple[str, torch.Tensor]]]
    gradient: Callable[[Any, str], torch.Tensor]
    leak: Callable[[Any], None]


def _fsdp2_use_sgd(engine: Any) -> None:
    engine.optimizer = torch.optim.SGD([p for p in engine.packed.parameters() if p.requires_grad], lr=engine.spec.learner.learning_rate)


def _fsdp2_weights(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    # the export rounds to the compute dtype; what is compared are the master weights
    compute, engine.dtype = engine.dtype, torch.float32
    yield from engine.named_tensors()
    engine.dtype = compute


def _fsdp2_low_rank(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in engine.packed.model.named_parameters():
        if ".lora_A." in name:
            yield name.replace(".lora_A.default", ""), parameter.detach().full_tensor()


def _fsdp2_gradient(engine: Any, name: str) -> torch.Tensor:
    return local(dict(engine.packed.model.named_parameters())[name].grad)


def _fsdp2_leak(engine: Any) -> None:
    def see_the_one_before(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        micro, *others = arguments
        return replace(micro, parents=(micro.segments - 1).clamp(min=0)), *others

    engine.packed.register_forward_pre_hook(see_the_one_before)


def _megatron_use_sgd(engine: Any) -> None:
    # inside the distributed optimizer, which takes Adam alone: its shards are views, which torch takes from nobody
    for sharded in engine.optimizer.chained_optimizers:
        sgd = torch.optim.SGD([torch.zeros(1)], lr=engine.spec.learner.learning_rate)
        sgd.param_groups = [sgd.defaults | {"params": group["params"]} for group in sharded.optimizer.param_groups]
        sharded.optimizer = sgd


def _megatron_weights(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    from asyncrl.learner.megatron.masters import Masters
    from asyncrl.learner.megatron.weights import export_tensors

    masters, chunks = Masters(engine.optimizer), [chunk.module for chunk in engine.chunks]
    yield from export_tensors(
        chunks,
        engine.built.config,
        engine.parallel,
        value_head=engine.value,
        dtype=torch.float32,
        value=lambda parameter: masters.gather(parameter, "weight"),
    )


def _megatron_low_rank(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ()


def _megatron_gradient(engine: Any, name: str) -> torch.Tensor:
    from asyncrl.learner.megatron.weights import own_parameters

    chunks = [chunk.module for chunk in engine.chunks]
    own = own_parameters(chunks, engine.built.config, engine.parallel, value_head=engine.value)
    (parameter,) = (parameter for entry, parameter in own if [file.name for file in entry.files] == [name])
    return parameter.main_grad


def _megatron_leak(engine: Any) -> None:
    class Leaking:
        def __init__(self, shares: Any) -> None:
            self.shares = shares

        def __getattr__(self, name: str) -> Any:
            return getattr(self.shares, name)

        def decode(self, chunk: Any, micro: Any) -> torch.Tensor:
            return self.shares.decode(chunk, replace(micro, parents=(micro.segments - 1).clamp(min=0)))

    engine.shares = Leaking(engine.shares)


ADAPTERS: Mapping[str, Adapter] = {
    "fsdp2": Adapter(use_sgd=_fsdp2_use_sgd, weights=_fsdp2_weights, low_rank=_fsdp2_low_rank, gradient=_fsdp2_gradient, leak=_fsdp2_leak),
    "megatron": Adapter(
        use_sgd=_megatron_use_sgd,
        weights=_megatron_weights,
        low_rank=_megatron_low_rank,
        gradient=_megatron_gradient,
        leak=_megatron_leak,
    ),
}
