from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from learner_support import batch_of, random_groups, rows_of, settings

from asyncrl.learner.batch import Row
from asyncrl.learner.objective import PolicyObjective
from asyncrl.learner.packing import filler, pack, parts_of, scatter

VALUES = torch.linspace(-6.0, -0.1, 997)


def stand_in(row: int, column: torch.Tensor) -> torch.Tensor:
    """A log-prob that depends on the token alone, as the model's does."""
    return VALUES[(row * 131 + column * 17) % 997]


def loss_and_gradient(rows: tuple[Row, ...], parts: list[list[int]], cap: int, **options: object) -> tuple[float, list[np.ndarray]]:
    """Sum over all micro-batches of all ranks, and the gradient with respect to each token's log-prob."""
    objective = PolicyObjective(settings(**options), "behavior")
    batch = batch_of(rows)
    gradients = [np.zeros(len(row.trajectory), np.float32) for row in rows]
    loss = 0.0
    for chosen in parts:
        for micro in [*pack([rows[i] for i in chosen], cap_tokens=cap, shared_prompt=True), filler()]:
            indices = [chosen[i] for i in micro.row_indices] or [0]
            logprobs = torch.stack([stand_in(indices[r], c) for r, c in zip(micro.rows.tolist(), micro.columns, strict=True)])
            logprobs.requires_grad_()
            output = objective(logprobs, -logprobs, micro, batch.denominators)
            output.loss.backward()
            loss += output.loss.item()
            assert logprobs.grad is not None
            scatter(logprobs.grad, micro, [gradients[i] for i in chosen])
    return loss, gradients


@examples(max_examples=60, deadline=None)
@given(
    num_groups=st.integers(1, 6),
    size=st.integers(2, 5),
    cap=st.integers(12, 90),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    aggregation=st.sampled_from(["token_mean", "sequence_mean"]),
    entropy_bonus=st.sampled_from([0.0, 0.1]),
)
def test_b24_loss_and_gradient_do_not_depend_on_micro_batches_or_ranks(
    num_groups: int, size: int, cap: int, num_ranks: int, seed: int, aggregation: str, entropy_bonus: float
):
    rows = rows_of(random_groups(num_groups, size, seed=seed))
    owner = np.random.default_rng(seed).integers(0, num_ranks, num_groups)
    parts = [[i for i in range(len(rows)) if owner[i // size] == rank] for rank in range(num_ranks)]
    options = {"aggregation": aggregation, "entropy_bonus": entropy_bonus}
    whole, whole_gradient = loss_and_gradient(rows, [list(range(len(rows)))], 100_000, **options)
    split, split_gradient = loss_and_gradient(rows, parts, cap, **options)
    assert abs(whole - split) <= 1e-6 * max(1.0, abs(whole))
    for one, other in zip(whole_gradient, split_gradient, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@examples(max_examples=100, deadline=None)
@given(
    num_groups=st.integers(0, 6),
    size=st.integers(1, 6),
    cap=st.integers(11, 60),
    shared=st.booleans(),
    quadratic=st.sampled_from([None, 0.0, 0.1]),
    seed=st.integers(0, 10_000),
)
def test_every_sampled_token_is_packed_once_under_the_cap_behind_its_own_past(
    num_groups: int, size: int, cap: int, shared: bool, quadratic: float | None, seed: int
):
    rows = rows_of(random_groups(num_groups, size, seed=seed))
    micros = pack(rows, cap_tokens=cap, shared_prompt=shared, quadratic=quadratic)
    seen: list[tuple[int, int]] = []
    for micro in micros:
        assert len(micro) <= cap
        for k in range(len(micro.rows)):
            row, column = micro.row_indices[int(micro.rows[k])], int(micro.columns[k])
            seen.append((row, column))
            trajectory = rows[row].trajectory
            assert int(micro.targets[k]) == trajectory.input_ids[column]
            place = int(micro.sources[k])
            assert int(micro.position_ids[0, place]) == column - 1
            segment, parent = int(micro.segments[place]), int(micro.parents[place])
            visible = [p for p in range(place + 1) if int(micro.segments[p]) in (segment, parent)]
            assert [int(micro.input_ids[0, p]) for p in visible] == trajectory.input_ids[:column].tolist()
    own = sum(part.size_tokens for part in parts_of(rows, cap_tokens=cap, shared_prompt=shared))
    assert sum(len(micro) for micro in micros) == own  # no padding
    expected = [(i, int(c)) for i, row in enumerate(rows) for c in np.flatnonzero(row.trajectory.loss_mask)]
    assert sorted(seen) == expected
