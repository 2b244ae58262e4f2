from gate_setup import A, ask, ask_all, finish, leased, new_gate


def test_lag_in_flight_counts_what_a_live_ticket_can_still_hold_and_forgets_older_reports():
    gate = new_gate(1, 1)
    first = ask(gate, 0)
    gate.heartbeat(A, 0, {0: 30}, 30, 0.5)
    assert gate.status().lag.in_flight == {0: 30}
    finish(gate, first)
    assert leased(gate, 0) == [first.ticket]
    gate.commit(0, 0)
    assert gate.status().lag.in_flight == {}, "the report is older than the group that was put"
    ask_all(gate, 1)
    gate.heartbeat(A, 1, {1: 8}, 38, 1.0)
    assert gate.status().lag.in_flight == {0: 8}
