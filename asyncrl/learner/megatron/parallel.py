"""How Megatron-core's ranks are laid out, and the groups of one rank.

Rank = tensor + T·(context + C·(data + D·stage)). A replica is the T·C·P ranks of one data index, which train the same rows; experts are
dealt to ranks across replicas, and each rank of an expert's group holds whole ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.config import LearnerConfig
from asyncrl.learner.megatron.standins import import_megatron

__all__ = ["MegatronLayout", "Parallel", "start_parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLayout:
    """Numbers of ranks.

    Attributes:
        ranks: all of the learner's; tensor: that cut matrices, and activations between them by position; pipeline: stages;
        chunks: pieces of the model on each stage, 1 where stages are not interleaved; context: that cut the tokens;
        expert: that experts are dealt to, among the ranks of one stage.

    Example:
        >>> MegatronLayout(ranks=8, tensor=2, pipeline=2).data
        2
    """

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    expert: int = 1

    @classmethod
    def of(cls, learner: LearnerConfig, ranks: int) -> MegatronLayout:
        """The layout that the options ask for, on the ranks that are there."""
        return cls(
            ranks=ranks,
            tensor=learner.tensor_parallel,
            pipeline=learner.pipeline_parallel,
            chunks=learner.virtual_pipeline,
            context=learner.context_parallel,
            expert=learner.expert_parallel,
        )

    @property
    def replica_ranks(self) -> int:
        """Ranks that train the same rows together."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Replicas that train different rows."""
        return self.ranks // self.replica_ranks

    def replica(self, index: int) -> list[int]:
        """The ranks of one replica, by stage, context and tensor index."""
        places = product(range(self.pipeline), range(self.context), range(self.tensor))
        return [tensor + self.tensor * (context + self.context * (index + self.data * stage)) for stage, context, tensor in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """One rank's place.

    Attributes:
        layout: of all ranks; tensor_rank, stage, context_rank, data_rank, expert_rank: its indices;
        tensor_group, pipeline_group, context_group, data_group, expert_group: the ranks that differ from it in that index alone
        (experts: the ranks that hold the others); replica_group: its replica's, None where it is alone; copies, copies_of_expert: the
        ranks that hold the same part of what is not, or is, an expert's.
    """

    layout: MegatronLayout
    tensor_rank: int
    stage: int
    context_rank: int
    data_rank: int
    expert_rank: int
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup | None
    copies: dist.ProcessGroup
    copies_of_expert: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        """Whether the model's head is here."""
        return self.stage == self.layout.pipeline - 1

    @property
    def is_source(self) -> bool:
        """The rank of a replica that fetches rows and returns results: first of tensor and context, last stage."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0


def start_parallel(layout: MegatronLayout) -> Parallel:
    """Makes the groups of the process group's ranks in Megatron-core's global state; what an earlier layout left there is dropped.

    Collective over all ranks. The generators of torch stay where they are.
    """
    import_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=_patience() / timedelta(minutes=1),
    )
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):  # modules want its generators to be there; nothing is drawn from them
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    return _place(layout, parallel_state)


def _patience() -> timedelta:
    """How long the group of all ranks waits for a silent one; a new group that is not told waits half an hour."""
    backend: Any = dist.group.WORLD
    patience: timedelta = backend._get_backend(torch.device("cpu")).options._timeout
    return patience


def _place(layout: MegatronLayout, state: Any) -> Parallel:
    data_rank = state.get_data_parallel_rank()
    replica_group: dist.ProcessGroup | None = None
    if layout.replica_ranks > 1:
        for index in range(layout.data):  # every rank makes every group
            group = dist.new_group(layout.replica(index), timeout=_patience())
            replica_group = group if index == data_rank else replica_group
    return Parallel(
        layout=layout,
        tensor_rank=state.get_tensor_model_parallel_rank(),
        stage=state.get_pipeline_model_parallel_rank(),
        context_rank=state.get_context_parallel_rank(),
        data_rank=data_rank,
        expert_rank=state.get_expert_model_parallel_rank(),
        tensor_group=state.get_tensor_model_parallel_group(),
        pipeline_group=state.get_pipeline_model_parallel_group(),
        context_group=state.get_context_parallel_group(),
        data_group=state.get_data_parallel_group(),
        expert_group=state.get_expert_model_parallel_group(),
        replica_group=replica_group,
        copies=state.get_data_parallel_group(with_context_parallel=True),
        copies_of_expert=state.get_expert_data_parallel_group(),
    )
