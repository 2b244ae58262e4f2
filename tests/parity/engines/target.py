"""Where the suite runs, from environment variables, and how far from the plain process a result may be there.

``ASYNCRL_CONFORMANCE_DEVICE``: ``cpu`` (gloo, the default) or ``cuda`` (NCCL, as many ranks as there are GPUs).
``ASYNCRL_CONFORMANCE_DTYPE``: ``float32`` (the default) or ``bfloat16``.
``ASYNCRL_CONFORMANCE_PAGE``: a file for the page of the result.

With fewer than four GPUs, ``-k agrees`` runs the cells that fit; the tests of the suite itself want a CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Bounds", "Target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Largest deviations that hold.

    Attributes:
        prediction: nats of a log-prob, or a value, of any sampled token; token_loss: of any sampled token.
        step: of loss and gradient norm of a training step, relative to the larger of one and the value.
        change: ‖difference of the changes of all weights‖ over ‖change‖; tensor: the same for each tensor alone, beside rounding.
    """

    prediction: float
    token_loss: float
    step: float
    change: float
    tensor: float


_BOUNDS = {
    "float32": Bounds(prediction=1e-5, token_loss=1e-5, step=1e-5, change=1e-4, tensor=1e-3),
    # two to three times what one rank alone is off by; a token at the edge of the clipping range can fall on either side of it
    "bfloat16": Bounds(prediction=0.05, token_loss=0.3, step=0.03, change=0.05, tensor=0.1),
}
# a token between two experts goes to another one for the sake of a rounding
_BFLOAT16_EXPERTS = Bounds(prediction=0.25, token_loss=0.6, step=0.06, change=0.2, tensor=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One device type and one compute precision."""

    device: str
    dtype: str

    @classmethod
    def from_environment(cls) -> Target:
        """The one place that reads the variables."""
        return cls(device=os.environ.get("ASYNCRL_CONFORMANCE_DEVICE", "cpu"), dtype=os.environ.get("ASYNCRL_CONFORMANCE_DTYPE", "float32"))

    @property
    def collectives(self) -> str:
        """The backend of the process group."""
        return "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"

    @property
    def most_ranks(self) -> int:
        """Ranks that this machine offers."""
        return torch.cuda.device_count() if self.device == "cuda" else 4

    @property
    def bounds(self) -> Bounds:
        """By compute precision."""
        return _BOUNDS[self.dtype]

    def bounds_of(self, model: str) -> Bounds:
        """Of a family of models: experts are chosen, and a choice does not round."""
        return _BFLOAT16_EXPERTS if self.dtype == "bfloat16" and "moe" in model else self.bounds

    def write_page(self, page: str) -> None:
        """Writes the page where it was asked for."""
        if file := os.environ.get("ASYNCRL_CONFORMANCE_PAGE"):
            Path(file).write_text(page)
