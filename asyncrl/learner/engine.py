"""The protocol of a training engine.

Role says why a model exists, Worker how it is called, Engine how ranks compute together, Module what runs. An engine is one
file that registers itself when it is imported.

Source: design note, section 5.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from asyncrl.config import LearnerConfig
from asyncrl.errors import UnsupportedError
from asyncrl.learner.batch import Batch, BatchOutput, LossFunction, TrainOutput
from asyncrl.learner.capabilities import Capabilities

__all__ = ["Engine", "EngineSpec", "Saving", "StepAbandoned"]


class Saving(Protocol):
    """A rank's part of a checkpoint on its way to the disk."""

    def done(self) -> bool:
        """Whether this rank has nothing left to write."""

    def wait(self, timeout_s: float) -> bool:
        """True once it is written, False where it is not after ``timeout_s``; raises why it cannot be."""


class StepAbandoned(Exception):
    """All ranks agreed to give the step up before any optimizer update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is built from: the model's folder, compute precision, device, options; ``trained``: whether it gets an optimizer."""

    model_dir: str
    dtype: str
    device: str
    learner: LearnerConfig
    trained: bool = True


class Engine(abc.ABC):
    """Ranks that compute one model together.

    All methods that touch the model are collective: every rank calls them in the same order. ``should_stop`` is asked, on every
    rank, before each micro-batch; it must give all ranks the same answer. ``capabilities`` is what ``asyncrl engines`` prints.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    @abc.abstractmethod
    def initialize(self) -> None:
        """Builds model, optimizer and schedule; the process group exists already."""

    @abc.abstractmethod
    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        """Loads what training needs, and offloads it on exit where the engine offloads."""

    @abc.abstractmethod
    def eval_mode(self) -> contextlib.AbstractContextManager[None]:
        """Loads what scoring needs."""

    @abc.abstractmethod
    def forward_backward_batch(
        self, batch: Batch, loss: LossFunction | None, *, forward_only: bool, should_stop: Callable[[], bool]
    ) -> BatchOutput:
        """Runs all micro-batches of one mini-batch, gradients summed over ranks."""

    @abc.abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forgets gradients."""

    @abc.abstractmethod
    def scale_gradients(self, factor: float) -> None:
        """Multiplies every gradient."""

    @abc.abstractmethod
    def optimizer_step(self) -> tuple[float, bool]:
        """Clips and steps; (norm before clipping, stepped): a norm that is not finite skips the step."""

    @abc.abstractmethod
    def lr_scheduler_step(self) -> float:
        """Moves the schedule on by one optimizer step; the new learning rate."""

    @property
    @abc.abstractmethod
    def data_parallel_size(self) -> int:
        """Replicas that train different rows."""

    @property
    @abc.abstractmethod
    def data_parallel_rank(self) -> int:
        """This rank's replica."""

    @property
    @abc.abstractmethod
    def data_parallel_group(self) -> torch.distributed.ProcessGroup:
        """The ranks, one of each replica, that sum gradients."""

    @property
    @abc.abstractmethod
    def model_parallel_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks of this rank's replica, which train the same rows; None where the replica is this rank alone."""

    @property
    @abc.abstractmethod
    def is_mp_source(self) -> bool:
        """Whether this rank fetches rows for its replica and returns results; one rank of each replica."""

    @abc.abstractmethod
    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors under Hugging Face names in the compute dtype, tied ones once; every rank must drain it."""

    @abc.abstractmethod
    def ties(self) -> dict[str, str]:
        """Tied names that ``named_tensors`` leaves out, each with the name that carries it."""

    @abc.abstractmethod
    def save(self, folder: Path, synced: bool = True) -> Saving:
        """Copies model, optimizer, schedule and RNG and begins to write them; ``synced``: done is when the disk has them."""

    @abc.abstractmethod
    def load(self, folder: Path) -> None:
        """Reads what :meth:`save` wrote."""

    def most_micro_batches(self, count: int) -> int:
        """The largest count of any replica: how many each of them runs, fillers included; collective over the data-parallel ranks.

        At least one, so that a step without rows still runs every collective.
        """
        agreed = torch.tensor([max(count, 1)], device=self.spec.device)
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX, group=self.data_parallel_group)
        return int(agreed.item())

    def train_batch(
        self,
        batch: Batch,
        loss: LossFunction,
        *,
        should_stop: Callable[[], bool],
        rescale: Callable[[torch.Tensor], float | None],
    ) -> TrainOutput:
        """zero_grad → forward_backward_batch → one optimizer step.

        ``rescale`` gets the statistics over all ranks and returns the factor that corrects the denominator, or None where nothing
        was trained: then the step is skipped.
        """
        with self.train_mode():
            self.optimizer_zero_grad()
            output = self.forward_backward_batch(batch, loss, forward_only=False, should_stop=should_stop)
            assert output.sums is not None
            factor = rescale(output.sums)
            if factor is None:
                self.optimizer_zero_grad()
                return _trained(output, 0.0, stepped=False, skipped="no trained tokens")
            if factor != 1.0:
                self.scale_gradients(factor)
            norm, stepped = self.optimizer_step()
            if stepped:
                self.lr_scheduler_step()
            self.optimizer_zero_grad()
        return _trained(output, norm, stepped=stepped, skipped="" if stepped else f"gradient norm is {norm}")

    def infer_batch(self, batch: Batch, *, should_stop: Callable[[], bool], adapters: bool = True) -> BatchOutput:
        """Scores rows without gradients; the predictions count on sources alone.

        Without ``adapters``: under the weights that training started from.
        """
        off = contextlib.nullcontext() if adapters else self.without_adapters()
        with self.eval_mode(), torch.no_grad(), off:
            return self.forward_backward_batch(batch, None, forward_only=True, should_stop=should_stop)

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model computes as if it had no adapters; UnsupportedError where it has none."""
        raise UnsupportedError("the weights that training started from are there while adapters are trained: set learner.lora_rank")


def _trained(output: BatchOutput, norm: float, *, stepped: bool, skipped: str) -> TrainOutput:
    assert output.sums is not None
    return TrainOutput(
        sums=output.sums,
        router_loss=output.router_loss,
        packed_tokens=output.packed_tokens,
        grad_norm=norm,
        stepped=stepped,
        skipped=skipped,
    )
