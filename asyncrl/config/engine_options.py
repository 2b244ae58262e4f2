"""Options of the learner that one engine has and another has not: refused where they are asked of the wrong one."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.refusals import Refusal
from asyncrl.config.schema import LearnerConfig
from asyncrl.errors import UnsupportedError

__all__ = ["INTERLEAVED_TWO", "LEFT_OUT", "ROUTER_LOSS_PIPELINE", "ROUTER_LOSS_RECOMPUTED", "check_engine_options", "check_interleaved"]

_MEGATRON = "learner.engine=megatron"
_FSDP2 = "learner.engine=fsdp2"

LEFT_OUT: Mapping[str, Mapping[str, Refusal]] = {
    "fsdp2": {
        "pipeline_parallel": Refusal(combination="pipeline parallel", reason="this engine cuts no model into stages", nearest=_MEGATRON),
        "virtual_pipeline": Refusal(combination="interleaved pipeline", reason="this engine cuts no model into stages", nearest=_MEGATRON),
        "context_parallel": Refusal(
            combination="context parallel",
            reason="this engine divides tokens and heads instead",
            nearest=f"learner.sequence_parallel, or {_MEGATRON}",
        ),
        "expert_parallel": Refusal(
            combination="expert parallel",
            reason="this engine sends no tokens to experts elsewhere",
            nearest=f"learner.ranks, over which experts are sharded as the rest is, or {_MEGATRON}",
        ),
    },
    "megatron": {
        "sequence_parallel": Refusal(
            combination="Ulysses sequence parallel",
            reason="this engine divides tokens without dividing heads",
            nearest="learner.context_parallel, with learner.tensor_parallel for the heads",
        ),
        "shard_ranks": Refusal(
            combination="sharding over part of the ranks",
            reason="its distributed optimizer shards over all data-parallel ranks",
            nearest="learner.shard_ranks=0",
        ),
        "offload": Refusal(
            combination="CPU offload",
            reason="weights and optimizer state stay where the model computes",
            nearest=f"more ranks, or {_FSDP2}",
        ),
        "lora_rank": Refusal(combination="LoRA", reason="no adapters are built for its divided layers", nearest=_FSDP2),
        "attention": Refusal(
            combination="a choice of attention", reason="it has one attention of its own", nearest="learner.attention=sdpa, the default"
        ),
    },
}
"""By engine, and by option of the group ``learner`` that has to keep its default there."""

ROUTER_LOSS_PIPELINE = Refusal(
    combination="a router's loss in a pipeline",
    reason="it multiplies means over the layers of all stages",
    nearest="learner.pipeline_parallel=1, or learner.router_loss=0",
)
ROUTER_LOSS_RECOMPUTED = Refusal(
    combination="a router's loss with activation checkpointing",
    reason="routers are computed again where the loss does not see them",
    nearest="learner.activation_checkpointing=false, or learner.router_loss=0",
)
INTERLEAVED_TWO = Refusal(
    combination="an interleaved pipeline of two stages on GPUs",
    reason="both directions go to the same peer, and NCCL cannot tell an activation from a gradient there",
    nearest="learner.virtual_pipeline=1, or learner.pipeline_parallel=4",
)


def check_engine_options(learner: LearnerConfig) -> None:
    """Raises UnsupportedError for what ``learner.engine`` has not, with the reason and the nearest that works.

    Example:
        >>> check_engine_options(LearnerConfig(engine="megatron", ranks=2, pipeline_parallel=2))
    """
    for name, refusal in LEFT_OUT[learner.engine].items():
        value = getattr(learner, name)
        if value != LearnerConfig.model_fields[name].default:
            raise UnsupportedError(refusal.text(f"learner.{name}={value} with learner.engine={learner.engine}"), option=f"learner.{name}")
    if learner.engine == "megatron" and learner.device == "cuda":
        check_interleaved(learner)
    if learner.engine == "megatron" and learner.router_loss:
        asked = f"learner.router_loss={learner.router_loss:g} with"
        if learner.pipeline_parallel > 1:
            raise UnsupportedError(ROUTER_LOSS_PIPELINE.text(f"{asked} learner.pipeline_parallel={learner.pipeline_parallel}"))
        if learner.activation_checkpointing:
            raise UnsupportedError(ROUTER_LOSS_RECOMPUTED.text(f"{asked} learner.activation_checkpointing=true"))


def check_interleaved(learner: LearnerConfig) -> None:
    """Raises UnsupportedError for a pipeline that only a CPU can interleave; where ``learner.device`` is not read yet the engine asks."""
    if learner.pipeline_parallel == 2 and learner.virtual_pipeline > 1:
        raise UnsupportedError(
            INTERLEAVED_TWO.text(f"learner.virtual_pipeline={learner.virtual_pipeline} with learner.pipeline_parallel=2")
        )
