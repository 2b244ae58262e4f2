"""Micro-batches through Megatron's own schedules: one after the other, 1F1B over pipeline stages, or interleaved.

Micro-batches of any length: stages tell each other the shapes. Losses arrive divided by the denominator of all ranks, so that
gradients are summed and nothing is divided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.megatron.standins import import_megatron

import_megatron()

from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

__all__ = ["Finish", "Forward", "count_for_pipeline", "run", "sum_gradients"]

Forward = Callable[[Any, MicroBatch], torch.Tensor]
"""(model chunk, micro-batch) → hidden states."""
Finish = Callable[[Any, torch.Tensor, MicroBatch], torch.Tensor]
"""(last chunk, hidden states, micro-batch) → scalar loss."""


def count_for_pipeline(count: int, stages: int, chunks: int) -> int:
    """Micro-batches, fillers included, that a schedule can take.

    The interleaved one wants a multiple of the stages. With exactly as many as stages it has only one micro-batch in flight towards
    each stage while shapes are told, and hangs: the least is twice as many.

    Example:
        >>> count_for_pipeline(1, stages=2, chunks=2)
        4
    """
    if chunks == 1:
        return count
    return max(-(-count // stages), 2) * stages


def run(chunks: Sequence[Any], micros: Sequence[MicroBatch], forward: Forward, finish: Finish, *, forward_only: bool) -> None:
    """Every micro-batch through every chunk of this rank, and backward unless ``forward_only``; collective over the pipeline."""

    def step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[Any, ...]]]:
        module, micro = getattr(chunk, "module", chunk), next(iterator)

        def close(hidden: torch.Tensor) -> tuple[Any, ...]:
            return finish(module, hidden, micro), torch.zeros((), dtype=torch.int, device=hidden.device), None

        return forward(module, micro), close

    iterators = [iter(micros) for _ in chunks]
    schedule = get_forward_backward_func()
    schedule(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micros),
        seq_length=max(len(micro) for micro in micros),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def sum_gradients(chunks: list[Any], tokens: torch.Tensor | None, **groups: Any) -> None:
    """What a schedule calls at its end: sums over replicas and over what ranks of a replica hold parts of; divides by no tokens."""
    finalize_model_grads(chunks, None, **groups)
