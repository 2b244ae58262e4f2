from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_support import rows_of, trajectory

from asyncrl.errors import DataError
from asyncrl.learner.batch import Row
from asyncrl.learner.packing import Part, attention_mask, filler, pack, pack_parts, parts_of, scatter, widened
from asyncrl.trajectory import Trajectory, TrajectoryGroup


def rows(*trajectories: Trajectory) -> list[Row]:
    return [Row(trajectory=t, advantage=1.0) for t in trajectories]


def test_b04_packs_of_four_and_three_give_each_sampled_token_its_own_index():
    packed = rows(trajectory([11, 12], [13, 14], group="g0"), trajectory([21, 22], [23], group="g1"))
    (micro,) = pack(packed, cap_tokens=8, shared_prompt=True)
    assert micro.input_ids.tolist() == [[11, 12, 13, 14, 21, 22, 23]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert micro.targets.tolist() == [13, 14, 23]
    assert micro.sources.tolist() == [1, 2, 5]  # the place before each, never across the border at 3|4
    assert micro.rows.tolist() == [0, 0, 1]
    assert micro.columns.tolist() == [2, 3, 2]
    out = [np.zeros(4, np.float32), np.zeros(3, np.float32)]
    scatter(torch.tensor([-0.1, -0.2, -0.3]), micro, out)
    np.testing.assert_allclose(out[0], [0.0, 0.0, -0.1, -0.2])
    np.testing.assert_allclose(out[1], [0.0, 0.0, -0.3])


def test_b05_masks_come_from_lengths_when_the_response_looks_like_padding():
    pad = 0
    (micro,) = pack(rows(trajectory([5, pad], [pad, 7, pad])), cap_tokens=8, shared_prompt=True)
    assert len(micro) == 5
    assert micro.targets.tolist() == [pad, 7, pad]
    assert micro.mask.tolist() == [1.0, 1.0, 1.0]


def test_siblings_share_one_prompt_and_do_not_see_each_other():
    packed = rows(trajectory([1, 2], [3, 4], sibling=0), trajectory([1, 2], [5], sibling=1))
    (micro,) = pack(packed, cap_tokens=8, shared_prompt=True)
    assert micro.input_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert micro.sources.tolist() == [1, 2, 1]  # both first tokens are predicted by the last prompt token
    assert attention_mask(micro, additive=None)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_strangers_do_not_see_each_other_in_the_additive_mask_either():
    (micro,) = pack(rows(trajectory([1], [2], group="g0"), trajectory([3], [4], group="g1")), cap_tokens=8, shared_prompt=True)
    mask = attention_mask(micro, additive=torch.float32)[0, 0]
    low = torch.finfo(torch.float32).min
    assert mask.tolist() == [[0, low, low, low], [0, 0, low, low], [low, low, 0, low], [low, low, 0, 0]]


def test_siblings_with_different_prompts_share_nothing():
    packed = rows(trajectory([1, 2], [3], sibling=0), trajectory([1, 9], [3], sibling=1))
    assert parts_of(packed, cap_tokens=8, shared_prompt=True) == [
        Part(rows=(0,), shared_tokens=0, size_tokens=3),
        Part(rows=(1,), shared_tokens=0, size_tokens=3),
    ]


def test_tokens_between_turns_are_seen_but_not_trained():
    middle = trajectory([1, 2], [3, 4, 5], loss_mask=[False, False, True, False, True], behavior_logprobs=[0, 0, -1, 0, -1])
    (micro,) = pack(rows(middle, trajectory([1, 2], [6], sibling=1)), cap_tokens=8, shared_prompt=True)
    assert micro.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert micro.targets.tolist() == [3, 5, 6]
    assert micro.sources.tolist() == [1, 3, 1]


def test_a_group_larger_than_the_cap_repeats_its_prompt_in_another_part():
    packed = rows(*(trajectory([1, 2, 3], [4, 5], sibling=s) for s in range(3)))
    assert parts_of(packed, cap_tokens=8, shared_prompt=True) == [
        Part(rows=(0, 1), shared_tokens=3, size_tokens=7),
        Part(rows=(2,), shared_tokens=3, size_tokens=5),
    ]


def test_a_single_trajectory_over_the_cap_is_named():
    with pytest.raises(DataError, match=r"micro_batch_tokens = 4 tokens; met 5 in sibling 2 of group g9") as caught:
        pack(rows(trajectory([1, 2], [3, 4, 5], group="g9", sibling=2)), cap_tokens=4, shared_prompt=True)
    assert (caught.value.group_id, caught.value.sibling) == ("g9", 2)


def test_first_fit_fills_the_longest_first_and_never_passes_the_cap():
    parts = [Part(rows=(i,), shared_tokens=0, size_tokens=size) for i, size in enumerate([3, 7, 5, 3, 2])]
    bins = pack_parts(parts, 10)
    assert [[part.rows[0] for part in chosen] for chosen in bins] == [[0, 1], [2, 3, 4]]  # 7+3, 5+3+2


def test_where_others_wait_the_most_expensive_micro_batch_comes_first():
    # first-fit under 12: {8}, {7, 5}, {6, 6}; tokens 8, 12, 12; pairs 64, 74, 72
    packed = rows(*(trajectory([1], [2] * (size - 1), group=f"g{i}") for i, size in enumerate([6, 7, 5, 8, 6])))
    assert [len(m) for m in pack(packed, cap_tokens=12, shared_prompt=True)] == [8, 12, 12]
    assert [m.row_indices for m in pack(packed, cap_tokens=12, shared_prompt=True, quadratic=0.0)] == [(1, 2), (0, 4), (3,)]
    group = rows(*(trajectory([1] * 5, [2] * 3, group="g9", sibling=s) for s in range(2)))  # 11 tokens, 25 + 2 * 39 pairs
    ordered = pack(packed[:1] + group, cap_tokens=12, shared_prompt=True, quadratic=0.1)
    assert [m.row_indices for m in ordered] == [(1, 2), (0,)]


def test_a_filler_counts_for_nothing_but_runs():
    micro = filler()
    assert (len(micro), micro.mask.tolist(), micro.row_indices) == (2, [0.0], ())


def test_groups_are_kept_together_when_their_rows_are_interleaved():
    a = [trajectory([1, 2], [3], group="g0", sibling=s) for s in range(2)]
    b = [trajectory([4], [5], group="g1", sibling=s) for s in range(2)]
    parts = parts_of(rows(a[0], b[0], a[1], b[1]), cap_tokens=16, shared_prompt=True)
    assert [part.rows for part in parts] == [(0, 2), (1, 3)]


def test_the_same_rows_always_give_the_same_micro_batches():
    group = TrajectoryGroup(trajectories=tuple(trajectory([1, 2], [3] * (s + 1), sibling=s) for s in range(4)))
    first, second = (pack(rows_of([group]), cap_tokens=9, shared_prompt=True) for _ in range(2))
    assert [m.input_ids.tolist() for m in first] == [m.input_ids.tolist() for m in second]


def test_a_pack_with_fewer_tokens_than_ranks_gets_tokens_that_see_and_are_seen_by_nobody_else():
    (micro,) = pack(rows_of([TrajectoryGroup(trajectories=(trajectory([1], [2]),))]), cap_tokens=8, shared_prompt=True)
    assert widened(micro, 2) is micro
    wide = widened(micro, 4)
    assert wide.input_ids.tolist() == [[1, 2, 0, 0]] and wide.position_ids.tolist() == [[0, 1, 0, 1]]
    assert (wide.sources.tolist(), wide.targets.tolist()) == ([0], [2])
    sees = attention_mask(wide, additive=None)[0, 0]
    assert not sees[:2, 2:].any() and not sees[2:, :2].any() and sees[:2, :2].tolist() == [[True, False], [True, True]]
