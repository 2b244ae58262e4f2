"""The ranks that serve the suite: what becomes of one that raises, dies or hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from engines.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.real


@pytest.fixture
def pool() -> Iterator[RankPool]:
    opened = RankPool(most_ranks=2, device="cpu", collectives="gloo")
    yield opened
    opened.close()


def summed(number: int) -> float:
    total = torch.tensor([float(number + torch.distributed.get_rank())])
    torch.distributed.all_reduce(total)
    return total.item()


def one_leaves(how: str) -> None:
    if torch.distributed.get_rank() == 1:
        if how == "raises":
            raise ValueError("no such layer")
        if how == "dies":
            os._exit(3)
    time.sleep(60.0)


@pytest.mark.parametrize(
    ("how", "said"), [("raises", "rank 1: .*no such layer"), ("dies", "rank 1: died"), ("hangs", "rank 0: silent for 2 s")]
)
def test_a_cell_that_fails_is_named_with_its_rank_and_the_next_one_runs(pool: RankPool, how: str, said: str):
    with pytest.raises(RanksFailed, match=f"(?s)the cell failed on 2 ranks.*{said}"):
        pool.run("the cell", 2, one_leaves, how, deadline_s=2.0 if how == "hangs" else 60.0)
    assert pool.run("the next", 2, summed, 4) == [9.0, 9.0]
