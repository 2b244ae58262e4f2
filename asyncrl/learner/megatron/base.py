"""Megatron-core: data, tensor, pipeline, context and expert parallelism; layouts of :mod:`asyncrl.learner.megatron.parallel`.

Gradients are summed over ranks, never averaged: the loss arrives divided by the denominator of all ranks. The last pipeline stage
has the predictions and the loss; its first tensor- and context-parallel rank is the source of a replica.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.algorithms.losses import STATISTICS
from asyncrl.learner.batch import Batch, BatchOutput, LossFunction, MicroBatch
from asyncrl.learner.engine import Engine, EngineSpec, Saving, StepAbandoned
from asyncrl.learner.megatron.built import build
from asyncrl.learner.megatron.exact import check_exact
from asyncrl.learner.megatron.masters import Masters
from asyncrl.learner.megatron.schedule import Finish, count_for_pipeline, run
from asyncrl.learner.megatron.state import MegatronState, load_state, save_state
from asyncrl.learner.megatron.updates import clip_and_step
from asyncrl.learner.megatron.weights import export_tensors, ties
from asyncrl.learner.optimizer import set_learning_rate
from asyncrl.learner.packing import filler, pack, scatter
from asyncrl.learner.router import balance_loss

__all__ = ["MegatronBase"]


class MegatronBase(Engine):
    """A model built from Megatron's layers; what it predicts, its two kinds say.

    Args:
        spec: model folder, compute dtype (``float32`` or ``bfloat16``), device, learner options.
    """

    value: bool
    """Whether the last stage has a head of one number."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.device = torch.device(spec.device if spec.device == "cpu" else f"cuda:{torch.cuda.current_device()}")
        self.dtype = getattr(torch, spec.dtype)
        self.optimizer_steps = 0

    @abc.abstractmethod
    def _predict(self, chunk: Any, hidden: torch.Tensor, micro: MicroBatch, *, entropy_gradient: bool) -> tuple[torch.Tensor, ...]:
        """What the loss takes, float32 [K] each, the first of them what is scored."""

    def initialize(self) -> None:
        """Builds this rank's chunks of the model, replicates them, and proves packing exact on all ranks together."""
        self.built = build(self.spec, device=self.device, dtype=self.dtype, value=self.value)
        self.chunks, self.parallel, self.shares = self.built.chunks, self.built.parallel, self.built.shares
        self.optimizer = self.built.optimizer
        self._checkpoint_group = dist.new_group(backend="gloo")  # a thread writes checkpoints while others compute
        with self.eval_mode(), torch.no_grad():
            check_exact(self._score, self.built.config.vocab_size, self.dtype, self.device)

    @contextlib.contextmanager
    def train_mode(self) -> Iterator[None]:
        """Nothing is offloaded: the modes only say whether layers are computed again in a backward pass to come."""
        for chunk in self.chunks:
            chunk.train()
        yield

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        """As :meth:`train_mode`."""
        for chunk in self.chunks:
            chunk.eval()
        yield

    def forward_backward_batch(
        self, batch: Batch, loss: LossFunction | None, *, forward_only: bool, should_stop: Callable[[], bool]
    ) -> BatchOutput:
        """See :class:`Engine`; a pipeline asks ``should_stop`` before its first micro-batch alone: what has begun there is finished."""
        settings = self.spec.learner
        micros = pack(batch.rows_N, cap_tokens=settings.micro_batch_tokens, shared_prompt=settings.shared_prompt, quadratic=batch.quadratic)
        packed_tokens = sum(len(micro) for micro in micros)
        stop = should_stop
        if self.parallel.layout.pipeline > 1:
            if should_stop():
                raise StepAbandoned
            stop = _never
        if forward_only:
            out_N = tuple(np.zeros(len(row.trajectory), dtype=np.float32) for row in batch.rows_N)
            self._score(micros, out_N, stop)
            return BatchOutput(sums=None, predictions_N=out_N, packed_tokens=packed_tokens)
        assert loss is not None
        sums = self._train(micros, loss, batch, stop)
        return BatchOutput(sums=sums[:-1], router_loss=float(sums[-1]), predictions_N=(), packed_tokens=packed_tokens)

    def _score(self, micros: Sequence[MicroBatch], out_N: Sequence[np.ndarray], should_stop: Callable[[], bool] | None = None) -> None:
        """Predictions of the last stage into ``out_N``, one array a row."""

        def finish(chunk: Any, hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            scatter(self._predict(chunk, hidden, micro, entropy_gradient=False)[0], micro, out_N)
            return hidden.new_zeros(())

        self._run(micros, finish, should_stop or _never, forward_only=True)

    def _train(self, micros: Sequence[MicroBatch], loss: LossFunction, batch: Batch, should_stop: Callable[[], bool]) -> torch.Tensor:
        """Float64 on every rank: the loss's statistics over all replicas, and as the last one the router's loss."""
        sums = torch.zeros(len(STATISTICS) + 1, dtype=torch.float64, device=self.device)

        def finish(chunk: Any, hidden: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            output = loss(*self._predict(chunk, hidden, micro, entropy_gradient=loss.entropy_gradient), micro, batch.denominators)
            router = self._router(micro) / max(batch.denominators.trajectories, 1)
            sums.add_(torch.cat([output.sums, router.detach().double()[None]]))
            return output.loss + self.spec.learner.router_loss * router

        self._run(micros, finish, should_stop, forward_only=False)
        dist.all_reduce(sums[:-1], group=self.data_parallel_group)
        dist.all_reduce(sums[:-1], group=self.parallel.pipeline_group)  # stages but the last have nothing
        dist.all_reduce(sums[-1:])
        return sums

    def _run(self, micros: Sequence[MicroBatch], finish: Finish, should_stop: Callable[[], bool], *, forward_only: bool) -> None:
        layout = self.parallel.layout
        count = count_for_pipeline(self.most_micro_batches(len(micros)), layout.pipeline, layout.chunks)
        even = [self.shares.even(micro).to(self.device) for micro in (*micros, *[filler()] * (count - len(micros)))]

        def forward(chunk: Any, micro: MicroBatch) -> torch.Tensor:
            if should_stop():
                raise StepAbandoned
            return self.shares.decode(chunk, micro)

        run(self.chunks, even, forward, finish, forward_only=forward_only)

    def _router(self, micro: MicroBatch) -> torch.Tensor:
        """This rank's part of the load-balancing loss, summed over rows; 0.0 where none is asked for."""
        if self.built.router is None:
            return torch.zeros((), device=self.device)
        slices = self.shares.slices(micro) if self.shares.both.size() > 1 else None
        return balance_loss(self.built.router.take(), self.built.config.num_experts_per_tok, micro, slices)

    def optimizer_zero_grad(self) -> None:
        """See :class:`Engine`."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def scale_gradients(self, factor: float) -> None:
        """See :class:`Engine`."""
        for chunk in self.chunks:
            chunk.scale_gradients(factor)

    def optimizer_step(self) -> tuple[float, bool]:
        """See :class:`Engine`."""
        return clip_and_step(self.optimizer, self.spec.learner.grad_clip)

    def lr_scheduler_step(self) -> float:
        """See :class:`Engine`."""
        self.optimizer_steps += 1
        return set_learning_rate(self.optimizer, self.optimizer_steps, self.spec.learner)

    @property
    def data_parallel_size(self) -> int:
        """See :class:`Engine`."""
        return self.parallel.layout.data

    @property
    def data_parallel_rank(self) -> int:
        """See :class:`Engine`."""
        return self.parallel.data_rank

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """See :class:`Engine`."""
        return self.parallel.data_group

    @property
    def model_parallel_group(self) -> dist.ProcessGroup | None:
        """See :class:`Engine`."""
        return self.parallel.replica_group

    @property
    def is_mp_source(self) -> bool:
        """True on the last stage's first rank of tensor and context parallelism."""
        return self.parallel.is_source

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :class:`Engine`; every rank gets them."""
        built = self.built
        yield from export_tensors(self._bare(), built.config, self.parallel, value_head=self.value, dtype=self.dtype)

    def _bare(self) -> list[Any]:
        return [getattr(chunk, "module", chunk) for chunk in self.chunks]

    def ties(self) -> dict[str, str]:
        """See :class:`Engine`."""
        return ties(self.built.config, value_head=self.value)

    def save(self, folder: Path, synced: bool = True) -> Saving:
        """See :class:`Engine`."""
        return save_state(self._state(), folder, synced)

    def load(self, folder: Path) -> None:
        """See :class:`Engine`."""
        self.optimizer_steps = load_state(self._state(), folder)
        set_learning_rate(self.optimizer, self.optimizer_steps, self.spec.learner)

    def _state(self) -> MegatronState:
        return MegatronState(
            chunks=self._bare(),
            config=self.built.config,
            parallel=self.parallel,
            value_head=self.value,
            masters=Masters(self.optimizer),
            optimizer_steps=self.optimizer_steps,
            group=self._checkpoint_group,
        )


def _never() -> bool:
    return False
