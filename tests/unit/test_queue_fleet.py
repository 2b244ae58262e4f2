"""The fleet's memory is bounded: the dead are forgotten first, and their tokens stay counted."""

from __future__ import annotations

import pytest

from asyncrl.errors import QueueError
from asyncrl.queue.fleet import Fleet


def test_the_first_to_die_is_forgotten_and_its_tokens_stay_counted() -> None:
    fleet = Fleet(limit=3)
    for number in range(3):
        fleet.hello(f"g{number}", float(number))
        fleet.report(f"g{number}", {}, 10 + number)
    fleet.gone("g1", "silent")
    fleet.gone("g0", "silent")
    fleet.hello("g3", 5.0)
    assert [fleet.remembers(name) for name in ("g0", "g1", "g2", "g3")] == [False, True, True, True]
    assert fleet.total_tokens() == 33 and fleet.versions().keys() == {"g2", "g3"}


def test_a_producer_too_many_is_refused_while_all_others_live_and_a_known_one_never() -> None:
    fleet = Fleet(limit=2)
    fleet.hello("a", 0.0)
    fleet.hello("b", 0.0)
    with pytest.raises(QueueError, match="up to 2 living producers; c would be one more"):
        fleet.hello("c", 0.0)
    fleet.hello("b", 1.0)
    assert fleet.versions().keys() == {"a", "b"}


def test_the_tokens_of_many_lives_do_not_grow_beyond_what_a_message_holds() -> None:
    fleet = Fleet(limit=2)
    for life in range(100):
        fleet.hello("a", float(life))
        fleet.report("a", {}, 1 << 48)
    assert fleet.total_tokens() == 1 << 49
