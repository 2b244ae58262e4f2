"""Proves on a loaded model, on all of its ranks together and before its first step, that packing is exact.

Attention that leaks, positions that go on where they should restart, or a router that drops tokens would all make a packed row's
predictions differ from those of the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.errors import UnsupportedError
from asyncrl.learner.batch import MicroBatch, Row
from asyncrl.learner.exactness import TOLERANCE
from asyncrl.learner.packing import pack
from asyncrl.learner.probe_rows import probe_row

__all__ = ["check_exact"]

Score = Callable[[Sequence[MicroBatch], Sequence[np.ndarray]], None]
"""Puts the predictions of micro-batches into arrays, one a row; on the last pipeline stage alone. Collective."""


def check_exact(score: Score, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Collective. Compares two siblings behind a shared prompt and a stranger, packed, with each of them alone.

    Raises:
        UnsupportedError: attention leaks between packed sequences.
    """
    probes = (("siblings", [1, 2, 3, 4, 5]), ("siblings", [1, 2, 3, 6, 4, 7]), ("stranger", [4, 3, 2, 1]))
    rows = [probe_row([token % vocabulary for token in ids], 3, group_id=group, sibling=i) for i, (group, ids) in enumerate(probes)]
    together, alone = _scored(score, rows, 64, shared=True), _scored(score, rows, max(len(ids) for _, ids in probes), shared=False)
    off = torch.from_numpy(np.concatenate([np.abs(a - b) for a, b in zip(together, alone, strict=True)])).max().nan_to_num(float("inf"))
    off = off.to(device)
    dist.all_reduce(off, op=dist.ReduceOp.MAX)  # only the last stage sees it, and all have to stop
    worst = off.item()
    if not worst < TOLERANCE[dtype]:
        raise UnsupportedError(
            f"packed, the model predicts what differs by {worst:.3g} from one sequence alone (limit {TOLERANCE[dtype]}): attention leaks"
        )


def _scored(score: Score, rows: list[Row], cap_tokens: int, *, shared: bool) -> list[np.ndarray]:
    out = [np.zeros(len(row.trajectory), dtype=np.float32) for row in rows]
    score(pack(rows, cap_tokens=cap_tokens, shared_prompt=shared), out)
    return out
