"""Builds this rank's chunks of a model under Megatron-core, without weights; which parameters come from where says :mod:`.names`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asyncrl.learner.megatron.hf_config import inverse_frequencies
from asyncrl.learner.megatron.norm import RMSNorm
from asyncrl.learner.megatron.parallel import MegatronLayout, Parallel

__all__ = ["build_chunks", "stages_of"]


def build_chunks(config: Any, core: Any, parallel: Parallel, *, attention: type[nn.Module], value_head: bool = False) -> list[Any]:
    """This rank's ``GPTModel`` chunks, one unless stages are interleaved; float32 on the CPU, weights undefined.

    Their ``rotary_pos_emb.inv_freq`` is what transformers computes. A value head is the last chunk's ``output_layer``: ``nn.Linear`` to
    one number, whole on every tensor rank.

    Args:
        config: the model's own; core: Megatron-core's made of it; attention: the module that computes softmax(QKᵀ)V.
    """
    return [_build(config, core, parallel.layout, attention, value_head, stage=stage) for stage in stages_of(parallel)]


def stages_of(parallel: Parallel) -> list[int]:
    """Of the P·V pieces that the layers are cut into, those on this rank: chunk v of stage p is piece p + P·v."""
    return [parallel.stage + parallel.layout.pipeline * chunk for chunk in range(parallel.layout.chunks)]


def _build(config: Any, core: Any, layout: MegatronLayout, attention: type[nn.Module], value_head: bool, *, stage: int) -> Any:
    from megatron.core.models.gpt import GPTModel

    first, last = stage == 0, stage == layout.pipeline * layout.chunks - 1
    chunk = GPTModel(
        config=core,
        transformer_layer_spec=_block(core, layout, attention),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=config.tie_word_embeddings and not value_head,
        position_embedding_type="rope",
        vp_stage=stage // layout.pipeline if layout.chunks > 1 else None,
    )
    chunk.rotary_pos_emb.inv_freq = inverse_frequencies(config)
    if last and value_head:
        chunk.output_layer = nn.Linear(config.hidden_size, 1, dtype=torch.float32)
    _mark_divided(chunk)
    return chunk


def _mark_divided(chunk: Any) -> None:
    """Says of weights what norms and sums over ranks go by.

    Tensor ranks hold different parts of some, each of which counts: 0.16.1 says so when it draws initial weights, which nothing here
    does. Experts are whole on each tensor rank and get other tokens there, so that their gradients are summed over tensor ranks
    too: 0.16.1 says so under expert parallelism alone, and is off by 2.2e-4 in the norm without.
    """
    from megatron.core import tensor_parallel as tp

    for module in chunk.modules():
        if isinstance(module, tp.ColumnParallelLinear | tp.RowParallelLinear | tp.VocabParallelEmbedding) and module.weight is not None:
            if not hasattr(module.weight, "tensor_model_parallel"):
                tp.set_tensor_model_parallel_attributes(module.weight, True, int(isinstance(module, tp.RowParallelLinear)), 1)
            if getattr(module, "is_expert", False):
                module.weight.allreduce = False


def _block(core: Any, layout: MegatronLayout, attention: type[nn.Module]) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(num_experts=core.num_moe_experts, qk_layernorm=core.qk_layernorm, normalization="RMSNorm")
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    heads: Any = parts.self_attention.submodules
    heads.core_attention = attention
    if core.qk_layernorm:
        heads.q_layernorm = heads.k_layernorm = RMSNorm
    layers = core.num_layers // (layout.pipeline * layout.chunks)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
