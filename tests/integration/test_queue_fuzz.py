"""Malformed messages: no crash, memory bounded, each accepted or refused. The million: ``python -m benchmarks.queue_fuzz``."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq

from asyncrl.config import Config
from asyncrl.config.run_dir import RunFacts
from asyncrl.queue.client import Observer
from benchmarks.queue_fuzz import WireTarget, flood
from benchmarks.queue_fuzz_broker import BrokerTarget
from benchmarks.queue_fuzz_messages import good_messages
from benchmarks.queue_mutator import MUTATIONS, mutants


def test_good_messages_are_accepted_as_they_are(tmp_path: Path) -> None:
    wire = WireTarget()
    assert [wire.receive(good.identity, list(good.frames)) for good in wire.good()] == [""] * len(good_messages())
    with BrokerTarget(tmp_path) as broker:
        for _ in range(500):
            (good,) = broker.good()
            said = broker.receive(good.identity, list(good.frames))
            assert said in ("", "QueueError")  # a step that is not leased, a ticket that is not held
        assert broker.steps > 0 and broker.outcomes["accepted"] > 10


def test_a_seed_decides_every_byte_and_each_mutation_has_its_turn() -> None:
    first, again, other = (list(itertools.islice(mutants(WireTarget().good, seed), 500)) for seed in (1, 1, 2))
    assert first == again and first != other
    assert Counter(mutant.kind for mutant in first) == {kind: 500 // len(MUTATIONS) for kind in MUTATIONS}


def test_each_mutation_breaks_most_of_what_it_touches() -> None:
    good = {(one.identity, one.frames) for one in good_messages()}
    same = Counter(
        mutant.kind
        for mutant in itertools.islice(mutants(good_messages, 3), 5000)
        if (mutant.identity, tuple(mutant.frames)) in good and mutant.kind not in ("replayed", "frames swapped")
    )
    assert all(number < 5000 / len(MUTATIONS) / 2 for number in same.values()), same


def test_what_is_no_refusal_is_a_crash_that_can_be_repeated() -> None:
    class Fragile(WireTarget):
        def receive(self, identity: bytes, frames: list[Any]) -> str:
            return str(1 // len(frames)) if not frames else ""

    tally = flood(Fragile(), 250, seed=5)
    assert tally.sent == 250 == tally.accepted + tally.crashed.total()
    assert tally.crashed["ZeroDivisionError in test_queue_fuzz.py:receive"] >= 10
    assert "seed 5, message" in tally.problems[0]


def test_a_broker_that_miscounts_is_found_out(tmp_path: Path) -> None:
    with BrokerTarget(tmp_path) as target:
        flood(target, 100, seed=6)
        assert target.problems() == []
        target._service.refused["SchemaError"] += 1
        assert "broker 1 counted" in target.problems()[0]


def test_decoders_take_twenty_thousand_malformed_messages_without_a_crash() -> None:
    tally = flood(WireTarget(), 20_000, seed=1)
    assert tally.problems == []
    assert tally.refused["SchemaError"] > 8_000 and tally.accepted > 4_000


def test_a_broker_takes_ten_thousand_malformed_messages_refuses_and_counts_them_and_trains_on(tmp_path: Path) -> None:
    with BrokerTarget(tmp_path) as target:
        tally = flood(target, 10_000, seed=1)
        assert tally.problems == []
        assert tally.refused["SchemaError"] > 4_000 and tally.refused["QueueError"] > 500 and tally.refused["cut_off"] > 0
        assert target.steps > 50 and target.outcomes["accepted"] > 200 and target.outcomes["refused"] > 10


def test_over_a_real_socket_strangers_are_refused_and_an_honest_observer_is_served(tmp_path: Path) -> None:
    target = BrokerTarget(tmp_path)
    results: list[tuple[int, dict[str, int]]] = []
    attack = threading.Thread(target=lambda: results.append(_attack(target._broker._facts)))
    attack.start()
    assert target._broker.run() == 0  # until the observer says stop
    attack.join(timeout=30)
    ((sent, refused),) = results
    replies_unread = refused.pop("unsent", 0)  # the attackers do not read, so that their pipes fill up
    assert refused["SchemaError"] > 500 and sum(refused.values()) <= sent and replies_unread <= sent


def _attack(facts: RunFacts) -> tuple[int, dict[str, int]]:
    """Sends malformed messages, each sender over a socket of its own; how many, and what an observer hears of them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets: dict[bytes, zmq.Socket[bytes]] = {}
    sent = 0
    for mutant in itertools.islice(mutants(good_messages, 9), 2000):
        if not mutant.frames or len(mutant.frames) > 100:
            continue
        if mutant.identity not in sockets:
            sockets[mutant.identity] = context.socket(zmq.DEALER)
            sockets[mutant.identity].connect(facts.queue_endpoints[0])
        sockets[mutant.identity].send_multipart(mutant.frames)
        sent += 1
    try:
        with Observer.connect(Config(), facts, "driver-2", timeout_s=30.0) as observer:
            before, now = {}, observer.status().refused
            while before != now:
                time.sleep(0.3)
                before, now = now, observer.status().refused
            observer.stop(exit=True)
    finally:
        context.destroy(linger=0)
    return sent, now
