"""One chunk of a Megatron model on one packed micro-batch: what the pipeline hands on, and hidden states of what is predicted.

Under context parallelism a rank computes one stretch of the pack, and under tensor parallelism its part of that stretch between the
matrices: so a pack is widened until all parts are equal.

Shapes: L tokens of a pack, n of them in a context-parallel rank's stretch, H hidden units, K sampled tokens, k of them predicted from
this stretch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.megatron.standins import import_megatron
from asyncrl.learner.packing import attention_mask, widened
from asyncrl.learner.slices import Slices, spread

import_megatron()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402

__all__ = ["Shares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How the ranks of one pipeline stage divide the tokens of a pack.

    Attributes:
        tensor: ranks that divide each matrix; context: ranks with a stretch each; both: the two together, tensor ranks side by side.
    """

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    both: dist.ProcessGroup

    @classmethod
    def of_this_rank(cls) -> Shares:
        """The groups that ``parallel_state`` has."""
        return cls(
            tensor=parallel_state.get_tensor_model_parallel_group(),
            context=parallel_state.get_context_parallel_group(),
            both=parallel_state.get_tensor_and_context_parallel_group(),
        )

    def even(self, micro: MicroBatch) -> MicroBatch:
        """The pack with tokens that nobody sees behind it, so that all ranks get equally many."""
        ranks = self.both.size()
        return widened(micro, -(-len(micro) // ranks) * ranks)

    def slices(self, micro: MicroBatch) -> Slices:
        """What each rank of the stage has between the matrices."""
        return Slices.of(len(micro), self.both)

    def decode(self, chunk: Any, micro: MicroBatch) -> torch.Tensor:
        """[n, 1, H], or a tensor-parallel rank's part of it, for the next stage or the head."""
        stretch = Slices.of(len(micro), self.context)
        own = slice(stretch.start, stretch.stop)
        angles = micro.position_ids[0, own, None].float() * chunk.rotary_pos_emb.inv_freq.to(micro.position_ids.device)
        hidden: torch.Tensor = chunk.decoder(
            hidden_states=chunk.embedding(input_ids=micro.input_ids[:, own], position_ids=None) if chunk.pre_process else None,
            attention_mask=attention_mask(micro, additive=None)[:, :, own],
            rotary_pos_emb=torch.cat((angles, angles), -1)[:, None, None],
        )
        return hidden

    def predicting(self, hidden: torch.Tensor, micro: MicroBatch, *, divided_head: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """[k, H] at the sources in this rank's stretch, and int64 [k], which of the K sampled tokens they predict.

        ``divided_head``: whether each tensor-parallel rank adds a part to the gradient of ``hidden``, or all have the same.
        """
        if self.tensor.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=divided_head, group=self.tensor)
        stretch = Slices.of(len(micro), self.context)
        own = torch.nonzero((micro.sources >= stretch.start) & (micro.sources < stretch.stop))[:, 0]
        return hidden[:, 0].index_select(0, micro.sources[own] - stretch.start), own

    def collect(self, values: torch.Tensor, own: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """[K] on every rank, of each stretch's [k]."""
        if self.context.size() == 1:
            return values
        return spread(values, own, len(micro.targets), self.context)
