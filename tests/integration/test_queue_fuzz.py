"""Malformed messages: no crash, memory bounded, each accepted or refused. The million: ``python -m benchmarks.queue_fuzz``."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from benchmarks.queue_fuzz import WireTarget, flood, good_messages
from benchmarks.queue_mutator import MUTATIONS, mutants


def test_good_messages_are_accepted_as_they_are() -> None:
    target = WireTarget()
    assert [target.receive(good.identity, list(good.frames)) for good in good_messages()] == [""] * len(good_messages())


def test_a_seed_decides_every_byte_and_each_mutation_has_its_turn() -> None:
    first, again, other = (list(itertools.islice(mutants(good_messages(), seed), 500)) for seed in (1, 1, 2))
    assert first == again and first != other
    assert Counter(mutant.kind for mutant in first) == {kind: 500 // len(MUTATIONS) for kind in MUTATIONS}


def test_each_mutation_breaks_most_of_what_it_touches() -> None:
    good = {(one.identity, one.frames) for one in good_messages()}
    same = Counter(
        mutant.kind
        for mutant in itertools.islice(mutants(good_messages(), 3), 5000)
        if (mutant.identity, tuple(mutant.frames)) in good and mutant.kind not in ("replayed", "frames swapped")
    )
    assert all(number < 5000 / len(MUTATIONS) / 2 for number in same.values()), same


def test_what_is_no_refusal_is_a_crash_that_can_be_repeated() -> None:
    class Fragile:
        def receive(self, identity: bytes, frames: list[Any]) -> str:
            return str(1 // len(frames)) if not frames else ""

    tally = flood(Fragile(), good_messages(), 250, seed=5)
    assert tally.sent == 250 == tally.accepted + tally.crashed.total()
    assert tally.crashed["ZeroDivisionError in test_queue_fuzz.py:receive"] >= 10
    assert "seed 5, message" in tally.problems[0]


def test_decoders_take_twenty_thousand_malformed_messages_without_a_crash() -> None:
    tally = flood(WireTarget(), good_messages(), 20_000, seed=1)
    assert tally.problems == []
    assert tally.refused["SchemaError"] > 8_000 and tally.accepted > 4_000
