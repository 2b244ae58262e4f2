"""FSDP2: each decoder layer sharded by itself, the scorer as root, float32 master weights; layouts of :mod:`asyncrl.learner.layout`.

Gradients are summed over ranks, never averaged: the loss arrives divided by the denominator of all ranks. They travel once per
mini-batch, after its last micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.config.refusals import CONTEXT_PARALLEL, EXPERT_PARALLEL, PIPELINE_PARALLEL, ROUTER_REPLAY, TURNS_ON_ONE_GPU
from asyncrl.learner.batch import Batch, BatchOutput, LossFunction, MicroBatch
from asyncrl.learner.capabilities import Capabilities
from asyncrl.learner.engine import Engine, EngineSpec, StepAbandoned
from asyncrl.learner.fsdp2_state import EngineState, load_state, save_state
from asyncrl.learner.hf_model import check_exact, layers_of, load_model, probe_of, refuse_windows, ties_of
from asyncrl.learner.layout import layout_of
from asyncrl.learner.optimizer import clip_gradients, learning_rate, local, new_optimizer
from asyncrl.learner.packing import filler, pack, scatter
from asyncrl.learner.registry import EngineRegistry
from asyncrl.learner.scoring import Scorer
from asyncrl.learner.tensor_parallel import use_tensor_parallel
from asyncrl.learner.ulysses import use_ulysses

__all__ = ["FSDP2Engine"]


@EngineRegistry.register(model_type="language_model", backend="fsdp2", devices=("cpu", "cuda"))
class FSDP2Engine(Engine):
    """A Hugging Face causal language model under ``fully_shard``.

    Args:
        spec: model folder, compute dtype (``float32`` or ``bfloat16``), device, learner options.
    """

    capabilities = Capabilities(
        models="any Hugging Face causal language model that declares its decoder layers and on which packing is exact",
        layouts=("data parallel",),
        refused=(PIPELINE_PARALLEL, CONTEXT_PARALLEL, EXPERT_PARALLEL, ROUTER_REPLAY, TURNS_ON_ONE_GPU),
    )

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.device = torch.device(spec.device if spec.device == "cpu" else f"cuda:{torch.cuda.current_device()}")
        self.dtype = getattr(torch, spec.dtype)
        self.optimizer_steps = 0

    def initialize(self) -> None:
        """Loads the model on every rank, proves packing exact on it, divides and shards it; proves it again where replicas share work."""
        settings = self.spec.learner
        self.layout = layout_of(self.device.type, settings)
        model = load_model(self.spec.model_dir, settings.attention)
        refuse_windows(model.config, settings.micro_batch_tokens)
        self._ties = ties_of(model)
        self.scorer = Scorer(
            model, attention=settings.attention, chunk_tokens=settings.logits_chunk_tokens, compute_dtype=torch.float32
        ).eval()
        probe = probe_of(self.scorer)
        check_exact(self.scorer, probe, torch.device("cpu"))
        self.scorer.compute_dtype = self.dtype
        self._to_device()
        self.scorer.train()
        if settings.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._divide(model)
        self._shard(layers_of(model))
        if self.layout.replica is not None:
            check_exact(self.scorer, probe, self.device)
            self._reshard()
        self.optimizer = new_optimizer(self.scorer.parameters(), settings)

    def _to_device(self) -> None:
        if not self.spec.learner.offload:
            self.scorer.to(self.device)
            return
        for module in self.scorer.modules():  # weights stay; what is computed with on the device goes there
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))

    def _divide(self, model: Any) -> None:
        self._partial: list[torch.nn.Module] = []
        if self.layout.shares == "matrices":
            assert self.layout.replica is not None
            self._partial = use_tensor_parallel(model, layers_of(model), self.layout.replica)
        elif self.layout.shares == "tokens":
            assert self.layout.replica_group is not None
            use_ulysses(model, self.layout.replica_group)
        self.scorer.divide(self.layout)

    def _shard(self, layers: list[torch.nn.Module]) -> None:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.spec.learner.offload else OffloadPolicy()
        for module in layers:
            self._fully_shard(module, self.layout.layers, policy, offload, reshard=self._sharded_layers)
        self._fully_shard(self.scorer, self.layout.root, policy, offload, reshard=False)
        self._root: Any = self.scorer
        self._fsdp_modules = [module for module in self.scorer.modules() if isinstance(module, FSDPModule)]
        for module in self._fsdp_modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    @property
    def _sharded_layers(self) -> bool:
        """Whether a layer's weights lie on more than one rank."""
        return self.layout.layers.size(-1) > 1

    @staticmethod
    def _fully_shard(
        module: torch.nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, offload: OffloadPolicy, *, reshard: bool
    ) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)

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
        micros = pack(batch.rows_N, cap_tokens=settings.micro_batch_tokens, shared_prompt=settings.shared_prompt)
        packed_tokens = sum(len(micro) for micro in micros)
        micros += [filler()] * (self._agree_max(len(micros)) - len(micros))
        out_N = tuple(np.zeros(len(row.trajectory), dtype=np.float32) for row in batch.rows_N)
        sums: torch.Tensor | None = None
        for k, micro in enumerate(micros):
            if should_stop():
                self._abandon(loss, batch, begun=k > 0 and not forward_only)
            moved = micro.to(self.device)
            if forward_only:
                scatter(self.scorer(moved, False)[0], micro, out_N)
                continue
            assert loss is not None
            part = self._forward_backward(moved, loss, batch, last=k == len(micros) - 1)
            sums = part if sums is None else sums + part
        if sums is not None:
            self._complete_gradients()
            dist.all_reduce(sums, group=self.data_parallel_group)
        return BatchOutput(sums=sums, logprobs_N=out_N if forward_only else (), packed_tokens=packed_tokens)

    def _forward_backward(self, micro: MicroBatch, loss: LossFunction, batch: Batch, *, last: bool) -> torch.Tensor:
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        self._root.set_reshard_after_backward(last or self._sharded_layers)
        logprobs, entropy = self.scorer(micro, loss.entropy_gradient)
        output = loss(logprobs, entropy, micro, batch.denominators)
        torch.autograd.backward(output.loss)
        return output.sums

    def _complete_gradients(self) -> None:
        """Sums over the replica what its ranks hold parts of."""
        for module in self._partial:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=self.layout.replica_group)

    def _abandon(self, loss: LossFunction | None, batch: Batch, *, begun: bool) -> NoReturn:
        if begun:
            # gradients of earlier micro-batches are still held unsharded: a last pass of weight zero brings them where they can be dropped
            assert loss is not None
            self._forward_backward(filler().to(self.device), loss, batch, last=True)
            self.optimizer_zero_grad()
        raise StepAbandoned

    def _agree_max(self, count: int) -> int:
        # at least one, so that a step without rows still runs every collective
        agreed = torch.tensor([max(count, 1)], device=self.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=self.data_parallel_group)
        return int(agreed.item())

    def optimizer_zero_grad(self) -> None:
        """See :class:`Engine`."""
        self.optimizer.zero_grad(set_to_none=True)

    def scale_gradients(self, factor: float) -> None:
        """See :class:`Engine`."""
        for parameter in self.scorer.parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)

    def optimizer_step(self) -> tuple[float, bool]:
        """See :class:`Engine`."""
        norm = clip_gradients(self.scorer.parameters(), self.spec.learner.grad_clip, dist.get_world_size())
        if not np.isfinite(norm):
            return norm, False
        self.optimizer.step()
        return norm, True

    def lr_scheduler_step(self) -> float:
        """See :class:`Engine`."""
        self.optimizer_steps += 1
        return self._set_learning_rate()

    def _set_learning_rate(self) -> float:
        rate = learning_rate(self.optimizer_steps, self.spec.learner)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    @property
    def data_parallel_size(self) -> int:
        """See :class:`Engine`."""
        return self.layout.data.size()

    @property
    def data_parallel_rank(self) -> int:
        """See :class:`Engine`."""
        return self.layout.data.get_local_rank()

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """See :class:`Engine`."""
        return self.layout.data.get_group()

    @property
    def is_mp_source(self) -> bool:
        """True on the first rank of each replica."""
        return self.layout.is_source

    @property
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """See :class:`Engine`."""
        return self.layout.replica_group

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`Engine`."""
        for name, parameter in self.scorer.model.named_parameters():
            tensor = parameter.detach()
            moved: Any = tensor.to(self.device)  # collectives run where the model computes
            full = moved.full_tensor() if isinstance(tensor, DTensor) else moved
            yield name, full.to(self.dtype)

    def ties(self) -> dict[str, str]:
        """See :class:`Engine`."""
        return dict(self._ties)

    def save(self, folder: Path, synced: bool = True) -> None:
        """See :class:`Engine`."""
        save_state(self._state(), folder, synced)

    def load(self, folder: Path) -> None:
        """See :class:`Engine`."""
        self.optimizer_steps = load_state(self._state(), folder)
        self._set_learning_rate()

    def _state(self) -> EngineState:
        return EngineState(model=self.scorer.model, optimizer=self.optimizer, optimizer_steps=self.optimizer_steps)
