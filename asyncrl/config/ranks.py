"""Numbers of ranks, and how they divide each other."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.schema import LearnerConfig

__all__ = ["Layout", "divisor", "multiple"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Numbers of ranks.

    Attributes:
        engine: whose rules hold.
        ranks: all of the learner's.
        tensor_parallel, sequence_parallel, pipeline_parallel, context_parallel: ranks of one replica that cut the matrices, the tokens
            and heads, the layers, or the tokens alone, among them.
        virtual_pipeline: chunks of layers of one pipeline stage.
        expert_parallel: ranks that whole experts are dealt to, among all ranks of a stage.
        shard_ranks: ranks that one copy of the weights is sharded over; 0: all data-parallel ones.
        lora_rank: inner size of the adapters; 0: none.

    Example:
        >>> Layout(ranks=8, tensor_parallel=2).data_parallel
        4
    """

    engine: str = "fsdp2"
    ranks: int
    tensor_parallel: int = 1
    sequence_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    shard_ranks: int = 0
    lora_rank: int = 0

    @classmethod
    def of(cls, learner: LearnerConfig) -> Layout:
        """The layout that the options ask for."""
        return cls(
            engine=learner.engine,
            ranks=learner.ranks,
            tensor_parallel=learner.tensor_parallel,
            sequence_parallel=learner.sequence_parallel,
            pipeline_parallel=learner.pipeline_parallel,
            virtual_pipeline=learner.virtual_pipeline,
            context_parallel=learner.context_parallel,
            expert_parallel=learner.expert_parallel,
            shard_ranks=learner.shard_ranks,
            lora_rank=learner.lora_rank,
        )

    @property
    def replica_ranks(self) -> int:
        """Ranks that train the same rows together."""
        return self.tensor_parallel * self.sequence_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def data_parallel(self) -> int:
        """Replicas that train different rows."""
        return self.ranks // self.replica_ranks


def multiple(number: int, size: int) -> int:
    """The least multiple of ``size`` that is not below ``number``."""
    return -(-number // size) * size


def divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` up to ``limit``."""
    return next(n for n in range(min(limit, number), 0, -1) if number % n == 0)
