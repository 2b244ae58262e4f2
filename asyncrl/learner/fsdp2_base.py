"""FSDP2: each decoder layer sharded by itself, the whole model as root, float32 master weights; layouts of :mod:`asyncrl.learner.meshes`.

Gradients are summed over ranks, never averaged: the loss arrives divided by the denominator of all ranks. They travel once per
mini-batch, after its last micro-batch.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from asyncrl.config.engine_options import check_engine_options
from asyncrl.config.layout import Layout, check_layout, check_model_layout, check_router_loss
from asyncrl.learner.adapters import adapters_off, add_adapters, scale_of
from asyncrl.learner.batch import Batch, BatchOutput, LossFunction, MicroBatch
from asyncrl.learner.engine import Engine, EngineSpec, Saving, StepAbandoned
from asyncrl.learner.exactness import check_exact, probe_of
from asyncrl.learner.fsdp2_shard import shard
from asyncrl.learner.fsdp2_state import EngineState, load_state, save_state
from asyncrl.learner.hf_model import layers_of, refuse_windows, ties_of
from asyncrl.learner.hf_names import FileNames, file_tensors
from asyncrl.learner.meshes import meshes_of
from asyncrl.learner.optimizer import clip_gradients, local, new_optimizer, set_learning_rate
from asyncrl.learner.packed import PackedModel
from asyncrl.learner.packing import filler, pack, scatter, widened
from asyncrl.learner.tensor_parallel import use_tensor_parallel
from asyncrl.learner.ulysses import use_ulysses

__all__ = ["FSDP2Base"]


class FSDP2Base(Engine):
    """A Hugging Face model under ``fully_shard``; what it predicts, its two kinds say.

    Args:
        spec: model folder, compute dtype (``float32`` or ``bfloat16``), device, learner options.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.device = torch.device(spec.device if spec.device == "cpu" else f"cuda:{torch.cuda.current_device()}")
        self.dtype = getattr(torch, spec.dtype)
        self.optimizer_steps = 0

    @abc.abstractmethod
    def _load(self) -> PackedModel:
        """The model on the CPU, in float32."""

    @abc.abstractmethod
    def _predict(self, micro: MicroBatch, loss: LossFunction) -> tuple[torch.Tensor, ...]:
        """What the loss takes, and the router's loss."""

    def initialize(self) -> None:
        """Loads the model on every rank, proves packing exact on it, divides and shards it; proves it again where replicas share work."""
        settings = self.spec.learner
        layout = replace(Layout.of(settings), ranks=dist.get_world_size())
        check_engine_options(settings)
        check_layout(layout)
        self.meshes = meshes_of(self.device.type, layout)
        self._checkpoint_group = dist.new_group(backend="gloo")  # a thread writes checkpoints while others compute
        self.packed = self._load().eval()
        model = self.packed.model
        refuse_windows(model.config, settings.micro_batch_tokens)
        description = model.config.to_dict()
        check_model_layout(layout, description)
        check_router_loss(settings.router_loss, description)
        self._ties, self._files = ties_of(model), FileNames(model)
        probe = probe_of(self.packed)
        check_exact(self.packed, probe, torch.device("cpu"))
        if settings.lora_rank:
            add_adapters(model, settings.lora_rank, settings.lora_alpha)
        self.packed.compute_dtype = self.dtype
        self._to_device()
        self.packed.train()
        if settings.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._divide()
        self._fsdp_modules = shard(self.packed, layers_of(model), self.meshes, self.dtype, offload=settings.offload)
        if self.meshes.replica is not None:
            check_exact(self.packed, probe, self.device)
            self._reshard()
        if self.spec.trained:
            self.optimizer = new_optimizer(self._trained(), settings)
        else:
            self.packed.requires_grad_(False)

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.packed.parameters() if parameter.requires_grad]

    def _to_device(self) -> None:
        if not self.spec.learner.offload:
            self.packed.to(self.device)
            return
        for module in self.packed.modules():  # weights stay; what is computed with on the device goes there
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))

    def _divide(self) -> None:
        model = self.packed.model
        self._partial: list[torch.nn.Module] = []
        if self.meshes.shares == "matrices":
            assert self.meshes.replica is not None
            self._partial = use_tensor_parallel(model, layers_of(model), self.meshes.replica)
        elif self.meshes.shares == "tokens":
            assert self.meshes.replica_group is not None
            use_ulysses(model, self.meshes.replica_group)
        self.packed.divide(self.meshes)

    @contextlib.contextmanager
    def train_mode(self) -> Iterator[None]:
        """Nothing is offloaded: both modes only make sure that shards hold the weights when they end."""
        try:
            yield
        finally:
            self._reshard()

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        """As :meth:`train_mode`."""
        try:
            yield
        finally:
            self._reshard()

    def _reshard(self) -> None:
        # gathered copies that outlive a pass would hide the next optimizer step
        for module in self._fsdp_modules:
            module.reshard()

    def forward_backward_batch(
        self, batch: Batch, loss: LossFunction | None, *, forward_only: bool, should_stop: Callable[[], bool]
    ) -> BatchOutput:
        """See :class:`Engine`."""
        settings = self.spec.learner
        micros = pack(batch.rows_N, cap_tokens=settings.micro_batch_tokens, shared_prompt=settings.shared_prompt, quadratic=batch.quadratic)
        packed_tokens = sum(len(micro) for micro in micros)
        micros += [filler()] * (self.most_micro_batches(len(micros)) - len(micros))
        micros = [widened(micro, self.meshes.replica_ranks) for micro in micros]
        out_N = tuple(np.zeros(len(row.trajectory), dtype=np.float32) for row in batch.rows_N)
        sums: torch.Tensor | None = None
        for k, micro in enumerate(micros):
            if should_stop():
                self._abandon(loss, batch, begun=k > 0 and not forward_only)
            moved = micro.to(self.device)
            if forward_only:
                scatter(self.packed.predict(moved), micro, out_N)
                continue
            assert loss is not None
            part = self._forward_backward(moved, loss, batch, last=k == len(micros) - 1)
            sums = part if sums is None else sums + part
        if sums is not None:
            self._complete_gradients()
            dist.all_reduce(sums[:-1], group=self.data_parallel_group)
            dist.all_reduce(sums[-1:])
        return BatchOutput(
            sums=None if sums is None else sums[:-1],
            router_loss=0.0 if sums is None else float(sums[-1]),
            predictions_N=out_N if forward_only else (),
            packed_tokens=packed_tokens,
        )

    def _forward_backward(self, micro: MicroBatch, loss: LossFunction, batch: Batch, *, last: bool) -> torch.Tensor:
        """Sums of the loss, and as the last one this rank's part of the router's."""
        root: Any = self.packed
        if self._fsdp_modules:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)
            root.set_reshard_after_backward(last or self.meshes.layers_are_sharded)
        *predictions, router = self._predict(micro, loss)
        output = loss(*predictions, micro, batch.denominators)
        router = router / max(batch.denominators.trajectories, 1)
        weight = self.spec.learner.router_loss
        torch.autograd.backward(output.loss + weight * router if weight else output.loss)
        return torch.cat([output.sums, router.detach().double()[None]])

    def _complete_gradients(self) -> None:
        """Sums over the replica what its ranks hold parts of."""
        for module in self._partial:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=self.meshes.replica_group)

    def _abandon(self, loss: LossFunction | None, batch: Batch, *, begun: bool) -> NoReturn:
        if begun:
            # gradients of earlier micro-batches are still held unsharded: a last pass of weight zero brings them where they can be dropped
            assert loss is not None
            self._forward_backward(widened(filler(), self.meshes.replica_ranks).to(self.device), loss, batch, last=True)
            self.optimizer_zero_grad()
        raise StepAbandoned

    def optimizer_zero_grad(self) -> None:
        """See :class:`Engine`."""
        self.optimizer.zero_grad(set_to_none=True)

    def scale_gradients(self, factor: float) -> None:
        """See :class:`Engine`."""
        for parameter in self._trained():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)

    def optimizer_step(self) -> tuple[float, bool]:
        """See :class:`Engine`."""
        norm = clip_gradients(self._trained(), self.spec.learner.grad_clip, dist.get_world_size())
        if not np.isfinite(norm):
            return norm, False
        self.optimizer.step()
        return norm, True

    def lr_scheduler_step(self) -> float:
        """See :class:`Engine`."""
        self.optimizer_steps += 1
        return set_learning_rate(self.optimizer, self.optimizer_steps, self.spec.learner)

    @property
    def data_parallel_size(self) -> int:
        """See :class:`Engine`."""
        return self.meshes.data.size()

    @property
    def data_parallel_rank(self) -> int:
        """See :class:`Engine`."""
        return self.meshes.data.get_local_rank()

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """See :class:`Engine`."""
        return self.meshes.data.get_group()

    @property
    def is_mp_source(self) -> bool:
        """True on the first rank of each replica."""
        return self.meshes.is_source

    @property
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """See :class:`Engine`."""
        return self.meshes.replica_group

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`Engine`; adapters are merged into what they adapt."""
        parameters = dict(self.packed.model.named_parameters())
        yield from file_tensors(parameters, self._files, scale=scale_of(self.spec.learner), dtype=self.dtype, whole=self._full)

    def _full(self, parameter: torch.Tensor) -> torch.Tensor:
        moved: Any = parameter.detach().to(self.device)  # collectives run where the model computes
        full: torch.Tensor = moved.full_tensor() if isinstance(moved, DTensor) else moved
        return full

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`Engine`."""
        return adapters_off(self.packed) if self.spec.learner.lora_rank else super().without_adapters()

    def ties(self) -> dict[str, str]:
        """See :class:`Engine`."""
        return dict(self._ties)

    def save(self, folder: Path, synced: bool = True) -> Saving:
        """See :class:`Engine`."""
        return save_state(self._state(), folder, synced)

    def load(self, folder: Path) -> None:
        """See :class:`Engine`."""
        self.optimizer_steps = load_state(self._state(), folder)
        set_learning_rate(self.optimizer, self.optimizer_steps, self.spec.learner)

    def _state(self) -> EngineState:
        return EngineState(
            model=self.packed.model, optimizer=self.optimizer, optimizer_steps=self.optimizer_steps, group=self._checkpoint_group
        )
