"""Selections and the limiter under any interleaving: draws that know no history, and never a standstill."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.queue.limiter import Limiter
from asyncrl.queue.selection import Freshest, Prioritised, Selection, Uniform
from asyncrl.queue.sum_tree import SumTree
from asyncrl.trajectory import GroupMeta

PROFILE = settings(max_examples=100, deadline=None)
MAKERS: dict[str, Callable[[], Selection]] = {
    "freshest": Freshest,
    "uniform": lambda: Uniform(seed=5),
    "prioritised": lambda: Prioritised(seed=5, exponent=0.6),
}
TICKETS = st.one_of(st.integers(0, 40), st.integers(0, 1 << 40))


def meta(ticket: int, version: int) -> GroupMeta:
    return GroupMeta(
        group_id=f"g{ticket}",
        ticket=ticket,
        attempt=0,
        incarnation=0,
        generator="generator-0",
        lengths_N=(4,),
        prompt_lengths_N=(1,),
        sampled_tokens_N=(3,),
        rewards_N=(1.0,),
        tokens_by_version={version: 3},
    )


@PROFILE
@given(st.lists(st.tuples(TICKETS, st.integers(0, 1 << 70)), max_size=40))
def test_the_sum_tree_finds_what_a_walk_over_sorted_leaves_finds(changes: list[tuple[int, int]]) -> None:
    tree, model = SumTree(), dict[int, int]()
    for leaf, weight in changes:
        tree.set(leaf, weight)
        model[leaf] = weight
    present = {leaf: weight for leaf, weight in sorted(model.items()) if weight}
    assert (tree.total, len(tree)) == (sum(present.values()), len(present))
    start = 0
    for leaf, weight in present.items():
        assert tree.find(start) == tree.find(start + weight - 1) == leaf
        start += weight
    for leaf in present:
        tree.set(leaf, 0)
    assert tree.num_nodes == 0


CHANGES = st.lists(
    st.tuples(st.sampled_from(["add", "add", "discard", "update", "sample"]), TICKETS, st.integers(0, 6), st.floats(0, 1e9)), max_size=50
)


@pytest.mark.parametrize("kind", sorted(MAKERS))
@PROFILE
@given(changes=CHANGES, step=st.integers(0, 1 << 40), n=st.integers(0, 12))
def test_a_draw_depends_on_seed_step_and_contents_alone(kind: str, changes: list[tuple[str, int, int, float]], step: int, n: int) -> None:
    selection, present = MAKERS[kind](), dict[int, tuple[int, float]]()
    for change, ticket, version, priority in changes:
        if change == "add" and ticket not in present:
            selection.add(ticket, meta(ticket, version), priority)
            present[ticket] = (version, priority)
        elif change == "discard":
            selection.discard(ticket)
            present.pop(ticket, None)
        elif change == "update":
            selection.update(ticket, priority)
            if ticket in present:
                present[ticket] = (present[ticket][0], priority)
        elif change == "sample":
            selection.sample(version, key=ticket)
    drawn = selection.sample(n, key=step)
    assert len(selection) == len(present)
    assert len(drawn) == len(set(drawn)) == min(n, len(present)) and set(drawn) <= set(present)
    recovered = MAKERS[kind]()
    for ticket in sorted(present):
        recovered.add(ticket, meta(ticket, present[ticket][0]), present[ticket][1])
    assert recovered.sample(n, key=step) == drawn == selection.sample(n, key=step)
    # a smaller batch is the beginning of a larger one
    assert selection.sample(n // 2, key=step) == drawn[: n // 2]
    if kind == "freshest":
        assert drawn == sorted(present, key=lambda ticket: (-present[ticket][0], ticket))[:n]


EIGHTHS = st.integers(2, 48).map(lambda number: Fraction(number, 8))


def new_limiter(rate: Fraction, least: int, buffer: Fraction, groups: int, uses: int) -> Limiter:
    return Limiter(float(rate), least, float(buffer), groups_per_step=groups, max_uses=uses)


@PROFILE
@given(rate=EIGHTHS, least=st.integers(1, 8), buffer=EIGHTHS, groups=st.integers(1, 8), uses=st.integers(1, 6))
def test_a_limiter_is_refused_exactly_when_a_rule_is_broken(rate: Fraction, least: int, buffer: Fraction, groups: int, uses: int) -> None:
    if rate > uses or 2 * buffer < rate + groups or least + buffer / rate < groups:
        with pytest.raises(ConfigError):
            new_limiter(rate, least, buffer, groups, uses)
    else:
        new_limiter(rate, least, buffer, groups, uses)


@PROFILE
@given(
    rate=EIGHTHS,
    least=st.integers(1, 8),
    spare=st.integers(0, 16).map(lambda number: Fraction(number, 8)),
    groups=st.integers(1, 6),
    more_uses=st.integers(0, 2),
    dice=st.randoms(use_true_random=False),
    drops=st.sampled_from([0.0, 0.1, 0.4]),
    order=st.sampled_from(["oldest", "newest", "any"]),
)
def test_a_limiter_that_was_not_refused_keeps_its_invariant_and_never_stands_still(
    rate: Fraction, least: int, spare: Fraction, groups: int, more_uses: int, dice: random.Random, drops: float, order: str
) -> None:
    uses = math.ceil(rate) + more_uses
    buffer = max((rate + groups) / 2, (groups - least) * rate, Fraction(0))
    buffer = Fraction(math.ceil(8 * buffer), 8) + spare
    limiter = new_limiter(rate, least, buffer, groups, uses)
    live, inserted, sampled, written_off = dict[int, int](), 0, 0, 0.0
    for _ in range(80):
        taken = sampled + written_off
        may_insert = limiter.may_insert(inserted, taken)
        may_sample = limiter.may_sample(inserted, taken, groups)
        assert may_insert or (may_sample and len(live) >= groups), "inserts and batches wait for each other"
        if live and dice.random() < drops:
            written_off += limiter.write_off(live.pop(dice.choice(list(live))))
        elif may_sample and len(live) >= groups and (not may_insert or dice.random() < 0.5):
            for ticket in dice.sample(list(live), groups) if order == "any" else sorted(live, reverse=order == "newest")[:groups]:
                live[ticket] += 1
                if live[ticket] == uses:
                    del live[ticket]
            sampled += groups
            assert rate * inserted - sampled - Fraction(written_off) >= rate * least - buffer
        elif may_insert:
            live[inserted] = 0
            inserted += 1
            assert rate * inserted - sampled - Fraction(written_off) <= rate * least + buffer
