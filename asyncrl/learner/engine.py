"""The protocol of a training engine, and the registry that finds one.

Role says why a model exists, Worker how it is called, Engine how ranks compute together, Module what runs. An engine is one
file that registers itself when it is imported.

Source: design note, section 5.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

from asyncrl.config import LearnerConfig
from asyncrl.errors import UnsupportedError
from asyncrl.learner.batch import Batch, BatchOutput, LossFunction, TrainOutput

__all__ = ["Engine", "EngineRegistry", "EngineSpec", "StepAbandoned"]


class StepAbandoned(Exception):
    """All ranks agreed to give the step up before any optimizer update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is built from: the model's folder, compute precision, device, options."""

    model_dir: str
    dtype: str
    device: str
    learner: LearnerConfig


class Engine(abc.ABC):
    """Ranks that compute one model together.

    All methods that touch the model are collective: every rank calls them in the same order. ``should_stop`` is asked, on every
    rank, before each micro-batch; it must give all ranks the same answer.
    """

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
        """Whether this rank fetches rows for its replica and returns results; one rank of each replica, rank 0 among them."""

    @abc.abstractmethod
    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors under Hugging Face names in the compute dtype, tied ones once; every rank must drain it."""

    @abc.abstractmethod
    def ties(self) -> dict[str, str]:
        """Tied names that ``named_tensors`` leaves out, each with the name that carries it."""

    @abc.abstractmethod
    def save(self, folder: Path, synced: bool = True) -> None:
        """Writes model, optimizer, schedule and RNG; ``synced`` waits until the disk has them."""

    @abc.abstractmethod
    def load(self, folder: Path) -> None:
        """Reads what :meth:`save` wrote."""

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
                return TrainOutput(
                    sums=output.sums, packed_tokens=output.packed_tokens, grad_norm=0.0, stepped=False, skipped="no trained tokens"
                )
            if factor != 1.0:
                self.scale_gradients(factor)
            norm, stepped = self.optimizer_step()
            if stepped:
                self.lr_scheduler_step()
            self.optimizer_zero_grad()
        skipped = "" if stepped else f"gradient norm is {norm}"
        return TrainOutput(sums=output.sums, packed_tokens=output.packed_tokens, grad_norm=norm, stepped=stepped, skipped=skipped)

    def infer_batch(self, batch: Batch, *, should_stop: Callable[[], bool]) -> BatchOutput:
        """Scores rows without gradients; the log-probs count on sources alone."""
        with self.eval_mode(), torch.no_grad():
            return self.forward_backward_batch(batch, None, forward_only=True, should_stop=should_stop)


_Key = tuple[str, str, str, str]
_E = TypeVar("_E", bound=type[Engine])


class EngineRegistry:
    """Engines by (model type, backend, device, vendor).

    Looked up as (device, vendor), then the device with any vendor, then, on CUDA devices of other vendors, what is registered for
    NVIDIA. A backend whose module does not import is named with its true import error.
    """

    _classes: ClassVar[dict[_Key, Callable[[EngineSpec], Engine]]] = {}
    _modules: ClassVar[dict[str, str]] = {"fsdp2": "asyncrl.learner.fsdp2"}

    @classmethod
    def register(cls, *, model_type: str, backend: str, devices: tuple[str, ...], vendor: str = "") -> Callable[[_E], _E]:
        """Registers a class at import; an empty vendor stands for any."""

        def add(engine: _E) -> _E:
            for device in devices:
                cls._classes[(model_type, backend, device, vendor)] = engine
            return engine

        return add

    @classmethod
    def find(cls, *, model_type: str, backend: str, device: str, vendor: str = "") -> Callable[[EngineSpec], Engine]:
        """The class for a key.

        Raises:
            UnsupportedError: nothing is registered for it, or its module does not import; lists what is registered.
        """
        import_error = cls._load(backend)
        for key in ((device, vendor), (device, ""), *([("cuda", "nvidia")] if device == "cuda" and vendor != "nvidia" else [])):
            found = cls._classes.get((model_type, backend, *key))
            if found is not None:
                return found
        raise UnsupportedError(
            f"no engine for model type {model_type!r}, backend {backend!r}, device {device!r}, vendor {vendor or 'any'!r}"
            + (f"; its module does not import: {import_error}" if import_error else "")
            + f"; registered: {'; '.join(cls.registered()) or 'none'}"
        )

    @classmethod
    def registered(cls) -> list[str]:
        """Readable keys of what is registered now."""
        return [
            f"{model_type}/{backend} on {device} ({vendor or 'any vendor'})" for model_type, backend, device, vendor in sorted(cls._classes)
        ]

    @classmethod
    def _load(cls, backend: str) -> str:
        if backend not in cls._modules:
            return ""
        try:
            importlib.import_module(cls._modules[backend])
        except ImportError as error:
            return f"{type(error).__name__}: {error}"
        return ""
