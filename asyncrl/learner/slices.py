"""The slice of a pack's tokens that a rank of a replica computes, and the collectives, forward and backward, that join slices again.

Every rank of a replica computes the whole loss from all log-probs, so what flows back into a join is the same on all of them: a
rank keeps its own part of it, and summing parameters' gradients over ranks counts each token once.

Shapes: L tokens of a pack, n of them in this rank's slice, K sampled tokens, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Slices", "applied", "cut", "join", "spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Slices of L tokens over the ranks of ``group``, sizes differing by one at most.

    Example:
        Five tokens on two ranks: tokens 0–2 and 3–4.
    """

    group: dist.ProcessGroup
    sizes: tuple[int, ...]
    rank: int

    @classmethod
    def of(cls, num_tokens: int, group: dist.ProcessGroup) -> Slices:
        """Cuts ``num_tokens`` over the ranks of a group."""
        world = dist.get_world_size(group)
        whole, more = divmod(num_tokens, world)
        return cls(group=group, sizes=tuple(whole + (r < more) for r in range(world)), rank=dist.get_rank(group))

    @property
    def start(self) -> int:
        """First token of this rank."""
        return sum(self.sizes[: self.rank])

    @property
    def stop(self) -> int:
        """One beyond this rank's last token."""
        return self.start + self.sizes[self.rank]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Everybody's [n, …] as [L, …]."""
        longest = max(self.sizes)
        padded = torch.nn.functional.pad(own, (0, 0) * (own.dim() - 1) + (0, longest - own.shape[0])).contiguous()
        everyone = padded.new_empty((len(self.sizes) * longest, *own.shape[1:]))
        dist.all_gather_into_tensor(everyone, padded, group=self.group)
        return torch.cat([everyone[r * longest : r * longest + size] for r, size in enumerate(self.sizes)])


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, slices: Slices) -> torch.Tensor:
        ctx.slices = slices
        return whole[slices.start : slices.stop].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.slices.gather(gradients[0]), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, slices: Slices) -> torch.Tensor:
        ctx.slices = slices
        return slices.gather(own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0][ctx.slices.start : ctx.slices.stop], None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, places: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(places)
        everyone = own.new_zeros(size)
        everyone[places] = own
        dist.all_reduce(everyone, group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0][places], None, None, None


def applied(function: Any, *arguments: Any) -> torch.Tensor:
    """The tensor that an autograd function gives; torch leaves ``apply`` without types."""
    result: torch.Tensor = function.apply(*arguments)
    return result


def cut(whole: torch.Tensor, slices: Slices) -> torch.Tensor:
    """This rank's [n, H] of [L, H]; the gradients of all slices come back joined."""
    return applied(_Cut, whole, slices)


def join(own: torch.Tensor, slices: Slices) -> torch.Tensor:
    """[L, H] of every rank's [n, H]; of the gradient, equal on all ranks, each takes its own slice."""
    return applied(_Join, own, slices)


def spread(own: torch.Tensor, places: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """[K] on every rank, from each rank's values at its ``places``; the gradient, equal on all ranks, goes back to those places."""
    return applied(_Spread, own, places, size, group)
