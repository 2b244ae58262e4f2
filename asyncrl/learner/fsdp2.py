"""FSDP2: each decoder layer sharded over all ranks, the scorer as root, float32 master weights.

Gradients are summed over ranks, never averaged: the loss arrives divided by the denominator of all ranks. They travel once per
mini-batch, after its last micro-batch. The layout is data parallel alone; every rank is its own model-parallel source.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.learner.batch import Batch, BatchOutput, LossFunction, MicroBatch
from asyncrl.learner.engine import Engine, EngineRegistry, EngineSpec, StepAbandoned
from asyncrl.learner.fsdp2_state import EngineState, load_state, save_state
from asyncrl.learner.hf_model import check_exact, layers_of, load_model, ties_of
from asyncrl.learner.optimizer import clip_gradients, learning_rate, local, new_optimizer
from asyncrl.learner.packing import filler, pack, scatter
from asyncrl.learner.scoring import Scorer

__all__ = ["FSDP2Engine"]


@EngineRegistry.register(model_type="language_model", backend="fsdp2", devices=("cpu", "cuda"))
class FSDP2Engine(Engine):
    """A Hugging Face causal language model under ``fully_shard``.

    Args:
        spec: model folder, compute dtype (``float32`` or ``bfloat16``), device, learner options.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.device = torch.device(spec.device if spec.device == "cpu" else f"cuda:{torch.cuda.current_device()}")
        self.dtype = getattr(torch, spec.dtype)
        self.optimizer_steps = 0

    def initialize(self) -> None:
        """Loads the model on every rank, proves packing exact on it, shards it."""
        settings = self.spec.learner
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = load_model(self.spec.model_dir, settings.attention)
        self._ties = ties_of(model)
        self.scorer = Scorer(
            model, attention=settings.attention, chunk_tokens=settings.logits_chunk_tokens, compute_dtype=torch.float32
        ).eval()
        check_exact(self.scorer)
        self.scorer.compute_dtype = self.dtype
        self.scorer.to(self.device).train()
        if settings.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._shard(layers_of(model))
        self.optimizer = new_optimizer(self.scorer.parameters(), settings)

    def _shard(self, layers: list[torch.nn.Module]) -> None:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        alone = self.mesh.size() == 1
        for module in (*layers, self.scorer):
            fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=not alone and module is not self.scorer)
        self._root: Any = self.scorer
        self._sharded = [module for module in self.scorer.modules() if isinstance(module, FSDPModule)]
        for module in self._sharded:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

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
        for module in self._sharded:
            module.reshard()

    def forward_backward_batch(
        self, batch: Batch, loss: LossFunction | None, *, forward_only: bool, should_stop: Callable[[], bool]
    ) -> BatchOutput:
        """See :class:`Engine`."""
        settings = self.spec.learner
        micros = pack(batch.rows_N, cap_tokens=settings.micro_batch_tokens, shared_prompt=settings.shared_prompt, quadratic=batch.quadratic)
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
            dist.all_reduce(sums, group=self.data_parallel_group)
        return BatchOutput(sums=sums, logprobs_N=out_N if forward_only else (), packed_tokens=packed_tokens)

    def _forward_backward(self, micro: MicroBatch, loss: LossFunction, batch: Batch, *, last: bool) -> torch.Tensor:
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        self._root.set_reshard_after_backward(last or self.mesh.size() > 1)
        logprobs, entropy = self.scorer(micro, loss.entropy_gradient)
        output = loss(logprobs, entropy, micro, batch.denominators)
        torch.autograd.backward(output.loss)
        return output.sums

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
        norm = clip_gradients(self.scorer.parameters(), self.spec.learner.grad_clip, self.data_parallel_group, self.mesh.size())
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
        return self.mesh.size()

    @property
    def data_parallel_rank(self) -> int:
        """See :class:`Engine`."""
        return self.mesh.get_local_rank()

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """See :class:`Engine`."""
        return self.mesh.get_group()

    @property
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """None: every rank is a replica by itself."""
        return None

    @property
    def is_mp_source(self) -> bool:
        """True on every rank: no tensor, pipeline or context parallelism here."""
        return True

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`Engine`."""
        for name, parameter in self.scorer.model.named_parameters():
            tensor = parameter.detach()
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
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
        return EngineState(
            model=self.scorer.model, optimizer=self.optimizer, optimizer_steps=self.optimizer_steps, group=self.data_parallel_group
        )
