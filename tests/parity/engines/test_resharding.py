"""What one layout saved, another one continues as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engines.cells import CELLS
from engines.resharding import AFTER, BEFORE, CHAINS, chain
from engines.suite import Suite

pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", CHAINS)
def test_a_layout_continues_what_the_one_before_it_saved(suite: Suite, tmp_path: Path, name: str):
    start, expected = None, None
    for k, cell in enumerate(chain(name, suite.target.most_ranks)):
        end = tmp_path / f"link-{k}"
        ranks = np.array(suite.hop(cell, start=start, step=BEFORE * k, end=end))  # [ranks, steps, 2]
        if expected is not None:
            off = np.abs(ranks[:, :AFTER] - expected) / np.maximum(1.0, np.abs(expected))
            assert off.max() <= suite.target.bounds.step, f"{cell} after {start}: off by {off.max(axis=(0, 2))} in the steps after it"
        start, expected = end, ranks[0, BEFORE:]


def test_chains_save_and_load_in_every_layout_of_more_than_speed():
    linked = [cell for _, cells in CHAINS.values() for cell in cells]
    of_speed = {"fsdp2 checkpointing", "megatron checkpointing", "fsdp2 one rank, eager attention", "fsdp2 SP2×DP2"}
    assert {str(cell) for cell in CELLS} - set(linked) == of_speed
    for name in ("every layout", "every layout of Megatron"):
        first, *_, last = CHAINS[name][1]
        assert first == last, "so that each of them has saved and has loaded"
