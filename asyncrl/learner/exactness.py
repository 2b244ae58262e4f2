"""Proves on a loaded model, before its first step, that packing and the path through the head are exact.

Each rank proves it on the whole model, and all of them together again where replicas divide it among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncrl.errors import UnsupportedError
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.packed import PackedModel
from asyncrl.learner.packing import pack
from asyncrl.learner.probe_rows import probe_row

__all__ = ["TOLERANCE", "Probe", "check_exact", "probe_of"]

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""By compute precision, in nats or units of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A pack of which the predictions are known: ``expected`` is float32 [K]."""

    micro: MicroBatch
    expected: torch.Tensor


@torch.no_grad()
def probe_of(packed: PackedModel) -> Probe:
    """Two siblings behind a shared prompt and a stranger, packed, and what the model itself predicts of them one by one."""
    model, vocabulary = packed.model, packed.model.get_input_embeddings().weight.shape[0]
    probes = (("siblings", [1, 2, 3, 4, 5]), ("siblings", [1, 2, 3, 6, 4, 7]), ("stranger", [4, 3, 2, 1]))
    rows = [probe_row([token % vocabulary for token in ids], 3, group_id=group, sibling=i) for i, (group, ids) in enumerate(probes)]
    (micro,) = pack(rows, cap_tokens=64, shared_prompt=True)
    expected = torch.zeros(len(micro.targets))
    for number, row in enumerate(micro.row_indices):
        trajectory = rows[row].trajectory
        tokens = torch.from_numpy(trajectory.input_ids.astype(np.int64))[None]
        alone = packed.alone(model(input_ids=tokens, use_cache=False).logits[0, :-1].float(), tokens[0, 1:])
        expected[micro.rows == number] = alone[trajectory.prompt_length - 1 :]
    return Probe(micro=micro, expected=expected)


@torch.no_grad()
def check_exact(packed: PackedModel, probe: Probe, device: torch.device) -> None:
    """Compares what is predicted in a pack with that of one sequence alone; collective where the model is sharded.

    Raises:
        UnsupportedError: attention leaks between packed sequences, or the head does more than one matrix product.
    """
    limit = TOLERANCE[packed.compute_dtype]
    worst = (packed.predict(probe.micro.to(device)).cpu() - probe.expected).abs().max().item()
    if not worst < limit:
        raise UnsupportedError(
            f"packed, {type(packed.model).__name__} with attention {packed.attention!r} predicts what differs by {worst:.3g} from one "
            f"sequence alone (limit {limit}): its attention leaks or its head is more than a projection"
        )
