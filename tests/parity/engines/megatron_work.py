"""What ranks do in the tests of the Megatron engine beyond its cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.learner.batch import Batch
from asyncrl.learner.engine import Engine, StepAbandoned
from engines.batches import denominators, steps
from engines.recorder import PolicyRecorder
from engines.work import Order, engine_of, train_more

__all__ = ["Abandoned", "abandon", "leak_at_start", "overflow", "vocabulary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """``asked``: how often ``should_stop`` was; ``losses``: calls of the loss; ``after``, ``fresh``: (loss, norm) of the step that
    follows, and of the first step of another engine."""

    asked: int
    losses: int
    after: tuple[float, float]
    fresh: tuple[float, float]


def abandon(work: tuple[Order, int]) -> Abandoned:
    """Gives a step up at its n-th question, trains it again, and trains it on an engine that never stopped."""
    order, number = work
    engine = engine_of(order)
    rows = steps()[0] if engine.data_parallel_rank == 0 else ()
    recorder, asked = PolicyRecorder(rows), 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == number

    batch = Batch(rows_N=rows, denominators=denominators(steps()[0]))
    try:
        engine.train_batch(batch, recorder, should_stop=should_stop, rescale=lambda sums: 1.0)
    except StepAbandoned:
        (after,) = train_more(order, engine, range(1))
        (fresh,) = train_more(order, engine_of(order), range(1))
        return Abandoned(asked=asked, losses=recorder.calls, after=after, fresh=fresh)
    raise AssertionError("the step was not abandoned")


def overflow(order: Order) -> tuple[float, bool, bool]:
    """Norm, whether it stepped, and whether weights moved, of a step with one gradient that is not finite on the last rank."""
    engine: Any = engine_of(order)
    before = _weights(engine)
    step = engine.optimizer_step

    def step_on_infinity() -> tuple[float, bool]:
        if dist.get_rank() == dist.get_world_size() - 1:
            next(engine.chunks[-1].parameters()).main_grad.fill_(float("inf"))
        return step()

    engine.optimizer_step = step_on_infinity
    batch = Batch(rows_N=steps()[0] if engine.data_parallel_rank == 0 else (), denominators=denominators(steps()[0]))
    output = engine.train_batch(batch, PolicyRecorder(batch.rows_N), should_stop=lambda: False, rescale=lambda sums: 1.0)
    moved = any(not torch.equal(tensor, before[name]) for name, tensor in _named(engine))
    return output.grad_norm, output.stepped, moved


def _weights(engine: Engine) -> dict[str, torch.Tensor]:
    return dict(_named(engine))


def _named(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, tensor.clone()) for name, tensor in engine.named_tensors())


def leak_at_start(order: Order) -> str:
    """What the engine says when its attention lets every token see all before it."""
    from asyncrl.errors import UnsupportedError
    from asyncrl.learner.megatron import decode

    masks, decode.attention_mask = decode.attention_mask, lambda micro, additive: _everything(len(micro))
    try:
        engine_of(order)
    except UnsupportedError as error:
        return str(error)
    finally:
        decode.attention_mask = masks
    return ""


def _everything(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]


def vocabulary(chunk_tokens: int) -> dict[str, float]:
    """Worst deviations of divided log-probs, entropies and gradients from those of one matrix, with and without entropy gradient."""
    from asyncrl.learner.megatron.vocabulary import tempered_logprobs

    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=draw, requires_grad=True) for n in (7, 12))
    targets, temperatures = torch.randint(0, 12, (7,), generator=draw), 0.5 + torch.rand(7, generator=draw)
    by, off = torch.randn(2, 7, generator=draw), {}
    for entropy_gradient in (True, False):
        logprobs = torch.log_softmax(hidden @ weight.T / temperatures[:, None], -1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        plain = logprobs.gather(1, targets[:, None])[:, 0], entropies if entropy_gradient else entropies.detach()
        own = weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
        here = hidden.detach().clone().requires_grad_()
        found = tempered_logprobs(
            here,
            own,
            targets,
            temperatures,
            group=dist.group.WORLD,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )
        expected = torch.autograd.grad((by[0] * plain[0] + by[1] * plain[1]).sum(), (hidden, weight))
        gradients = torch.autograd.grad((by[0] * found[0] + by[1] * found[1]).sum(), (here, own))
        dist.all_reduce(gradients[0])  # each rank has a part of the hidden states' gradient
        parts = expected[0], expected[1].chunk(dist.get_world_size())[dist.get_rank()]
        names = ("log-probs", "entropies", "gradient of hidden states", "gradient of weights")
        for name, a, b in zip(names, (*found, *gradients), (*plain, *parts), strict=True):
            off[f"{name}, {entropy_gradient=}"] = float(np.abs((a - b).detach().numpy()).max())
    return off
