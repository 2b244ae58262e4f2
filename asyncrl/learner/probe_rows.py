"""Rows that nobody sampled, by which an engine is proven and timed before its first step."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.learner.batch import Row
from asyncrl.trajectory import Trajectory, VersionSpan

__all__ = ["probe_row"]


def probe_row(input_ids: Any, prompt_tokens: int, *, group_id: str, ticket: int = 0, sibling: int = 0) -> Row:
    """A row of the tokens given, of which all behind the prompt count as sampled."""
    size = len(input_ids)
    names: dict[str, Any] = dict.fromkeys(("attempt", "sample", "seed", "incarnation"), 0)
    trajectory = Trajectory.checked(
        group_id=group_id,
        ticket=ticket,
        sibling=sibling,
        prompt_id="probe",
        input_ids=input_ids,
        loss_mask=np.arange(size) >= prompt_tokens,
        behavior_logprobs=np.zeros(size),
        version_spans=[VersionSpan(prompt_tokens, 0)],
        reward=0.0,
        finish_reason="stop",
        temperature=1.0,
        generator="none",
        engine="none",
        dispatched_s=0.0,
        finished_s=0.0,
        **names,
    )
    return Row(trajectory=trajectory, advantage=0.0)
