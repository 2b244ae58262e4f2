"""At least 10,000 rules a run on one broker, and as many on several."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from queue_machine import QueueMachine

LEAST_RULES = 10_000
PROFILE = settings(
    max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


class OneBroker(QueueMachine):
    rules_run: ClassVar[Counter[str]] = Counter()


class Shards(QueueMachine):
    rules_run: ClassVar[Counter[str]] = Counter()
    shards = st.integers(2, 3)


def test_the_queue_keeps_its_promises_under_any_interleaving() -> None:
    run_state_machine_as_test(OneBroker, settings=PROFILE)
    assert OneBroker.rules_run["rules"] >= LEAST_RULES


def test_shards_keep_the_promises_of_one_queue_under_any_interleaving() -> None:
    run_state_machine_as_test(Shards, settings=PROFILE)
    assert Shards.rules_run["rules"] >= LEAST_RULES
