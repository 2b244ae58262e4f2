"""At least 10,000 rules a run on the gate, and as many on shards of it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from queue_drivers import GateDriver, ShardedDriver, gate_settings
from queue_machine import Driver, QueueMachine, Shape

LEAST_RULES = 10_000
PROFILE = settings(
    max_examples=300, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


class GateMachine(QueueMachine):
    def drive(self, shape: Shape) -> Driver:
        return GateDriver(gate_settings(shape, shape.groups))


class ShardMachine(QueueMachine):
    shapes = st.tuples(st.integers(2, 3), st.none())

    def drive(self, shape: Shape) -> Driver:
        shards: list[Driver] = [GateDriver(gate_settings(shape, shape.share(number))) for number in range(shape.shards)]
        return ShardedDriver(shape, shards)


def test_the_gate_keeps_its_promises_under_any_interleaving() -> None:
    run_state_machine_as_test(GateMachine, settings=PROFILE)
    assert GateMachine.rules_run >= LEAST_RULES


def test_shards_keep_the_promises_of_one_gate_under_any_interleaving() -> None:
    run_state_machine_as_test(ShardMachine, settings=PROFILE)
    assert ShardMachine.rules_run >= LEAST_RULES
