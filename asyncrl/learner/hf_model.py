"""Loads a Hugging Face causal model for training and proves, before it is sharded, that packing and the head path are exact on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.errors import UnsupportedError
from asyncrl.learner.batch import MicroBatch, Row
from asyncrl.learner.packing import pack
from asyncrl.learner.scoring import Scorer
from asyncrl.trajectory import Trajectory, VersionSpan

__all__ = ["Probe", "check_exact", "layers_of", "load_model", "probe_of", "refuse_windows", "ties_of"]

_TOLERANCE_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A pack whose log-probs are known: ``expected`` is float32 [K]."""

    micro: MicroBatch
    expected: torch.Tensor


def load_model(model_dir: str, attention: str) -> Any:
    """The model in float32 on the CPU, every dropout off: learner and generator must compute the same function."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir)
    for name in [name for name in vars(config) if name.endswith(("dropout", "_pdrop"))]:
        setattr(config, name, 0.0)
    return AutoModelForCausalLM.from_pretrained(model_dir, config=config, dtype=torch.float32, attn_implementation=attention)


def refuse_windows(config: Any, cap_tokens: int) -> None:
    """Raises UnsupportedError where a model's attention forgets tokens inside a pack: the masks made here know no window."""
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None)
    if slides and window and window < cap_tokens:
        raise UnsupportedError(
            f"attention reaches over learner.micro_batch_tokens = {cap_tokens} tokens; {config.model_type} slides over {window} "
            f"tokens: set learner.micro_batch_tokens to at most {window}"
        )


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The decoder layers, by the class names that the model itself declares inseparable.

    Raises:
        UnsupportedError: the model declares none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UnsupportedError(f"{type(model).__name__} declares no decoder layers (_no_split_modules): it cannot be sharded by layer")
    return layers


def ties_of(model: torch.nn.Module) -> dict[str, str]:
    """Names of parameters that are another one's tensor, with the name that carries it."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        carrier = first.setdefault(id(parameter), name)
        if carrier != name:
            ties[name] = carrier
    return ties


@torch.no_grad()
def probe_of(scorer: Scorer) -> Probe:
    """Two siblings behind a shared prompt and a stranger, packed, and the model's own log-probs of them one by one."""
    model, vocabulary = scorer.model, scorer.model.get_input_embeddings().weight.shape[0]
    probes = (("siblings", [1, 2, 3, 4, 5]), ("siblings", [1, 2, 3, 6, 4, 7]), ("stranger", [4, 3, 2, 1]))
    rows = [_probe(group, i, [token % vocabulary for token in ids]) for i, (group, ids) in enumerate(probes)]
    (micro,) = pack(rows, cap_tokens=64, shared_prompt=True)
    expected = torch.zeros(len(micro.targets))
    for number, row in enumerate(micro.row_indices):
        trajectory = rows[row].trajectory
        tokens = torch.from_numpy(trajectory.input_ids.astype(np.int64))[None]
        alone = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits[0].float(), dim=-1)
        expected[micro.rows == number] = alone[:-1].gather(1, tokens[0, 1:, None])[trajectory.prompt_length - 1 :, 0]
    return Probe(micro=micro, expected=expected)


@torch.no_grad()
def check_exact(scorer: Scorer, probe: Probe, device: torch.device) -> None:
    """Compares packed log-probs with those of one sequence alone; collective where the scorer is sharded.

    Raises:
        UnsupportedError: attention leaks between packed sequences, or the head does more than one matrix product.
    """
    limit = _TOLERANCE_NATS[scorer.compute_dtype]
    packed, _ = scorer(probe.micro.to(device), False)
    worst = (packed.cpu() - probe.expected).abs().max().item()
    if not worst < limit:
        raise UnsupportedError(
            f"packed log-probs of {type(scorer.model).__name__} with attention {scorer.attention!r} differ by {worst:.3g} nats from those "
            f"of one sequence alone (limit {limit}): its attention leaks or its head is more than a projection"
        )


def _probe(group_id: str, sibling: int, ids: list[int]) -> Row:
    mask = [index >= 3 for index in range(len(ids))]
    trajectory = Trajectory.checked(
        group_id=group_id,
        ticket=0,
        attempt=0,
        sibling=sibling,
        sample=0,
        prompt_id="probe",
        seed=0,
        incarnation=0,
        input_ids=ids,
        loss_mask=mask,
        behavior_logprobs=[0.0] * len(ids),
        version_spans=[VersionSpan(3, 0)],
        reward=0.0,
        finish_reason="stop",
        temperature=1.0,
        generator="probe",
        engine="probe",
        dispatched_s=0.0,
        finished_s=0.0,
    )
    return Row(trajectory=trajectory, advantage=0.0)
