from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.learner import cost_probe
from asyncrl.learner.batch import Batch
from asyncrl.learner.control import Control
from asyncrl.learner.cost_probe import measured_ratio, pair_cost


class Priced:
    """Passes that take 1 ms, 20 µs a token and 0.1 µs a pair of a clock of their own."""

    data_parallel_size = 2

    def __init__(self, pair_s: float = 1e-7, token_s: float = 2e-5) -> None:
        self.pair_s, self.token_s = pair_s, token_s
        self.now_s = 0.0
        self.lengths: list[list[int]] = []

    def infer_batch(self, batch: Batch, **options: Any) -> None:
        lengths = [len(row.trajectory) for row in batch.rows_N]
        self.lengths.append(lengths)
        self.now_s += 1e-3 + self.token_s * sum(lengths) + self.pair_s * sum(length**2 for length in lengths)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Priced:
    priced = Priced()
    monkeypatch.setattr(cost_probe, "time", SimpleNamespace(perf_counter=lambda: priced.now_s, monotonic=lambda: priced.now_s))
    return priced


def measure(engine: Priced, cap_tokens: int = 1024) -> float | None:
    return measured_ratio(engine, Control(0, 1, 1.0), cap_tokens=cap_tokens, longest_tokens=cap_tokens, vocab_size=64)


def test_the_measured_ratio_is_that_of_the_passes_and_counts_their_fixed_price_to_the_tokens(engine: Priced):
    # a pass of 1024 tokens: 1 ms + 20.48 ms, so 20.9766 µs a token
    assert measure(engine) == pytest.approx(1e-7 / (2e-5 + 1e-3 / 1024))


def test_probes_are_full_micro_batches_of_long_middling_and_short_rows(engine: Priced):
    measure(engine)
    assert [sorted(set(lengths)) for lengths in engine.lengths[-3:]] == [[64], [256], [1024]]
    assert {sum(lengths) for lengths in engine.lengths[2:]} == {1024}


def test_passes_that_take_too_long_are_not_tried(engine: Priced, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    engine.token_s = 1e-3
    assert measure(engine) is None
    assert [sum(lengths) for lengths in engine.lengths] == [64, 64]
    assert "takes too long to try" in caplog.text


def test_a_micro_batch_too_small_to_tell_says_so(engine: Priced, caplog: pytest.LogCaptureFixture):
    assert measure(engine, cap_tokens=2) is None
    assert "tell tokens from pairs no better" in caplog.text


@pytest.mark.parametrize(("replicas", "schedule", "measures"), [(2, "async", True), (1, "async", False), (2, "lockstep", False)])
def test_only_a_free_running_plan_over_replicas_is_measured(engine: Priced, tmp_path: Path, replicas: int, schedule: str, measures: bool):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "vocab_size": 64, "max_position_embeddings": 512}))
    engine.data_parallel_size = replicas
    config = Config.model_validate({"queue": {"schedule": schedule}})
    ratio = pair_cost(engine, Control(0, 1, 1.0), config, str(tmp_path))
    assert (ratio != 1 / 384) == bool(engine.lengths) == measures
    assert max((max(lengths) for lengths in engine.lengths), default=512) == 512  # no row longer than the model's positions
