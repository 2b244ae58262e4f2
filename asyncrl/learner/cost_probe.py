"""Measures at start what a token and a pair cost on this engine, where a plan depends on it.

Passes are forward only, so that no gradient, weight or optimizer state can be touched; the backward pass takes about twice as long
for both terms and leaves their ratio. Each probe is a full micro-batch, as training packs them, so that the price of a pass itself is
in that of its tokens; the probes differ in the length of their rows alone.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from asyncrl.algorithms.losses import Denominators
from asyncrl.config import Config
from asyncrl.learner.batch import Batch, Row
from asyncrl.learner.control import Control
from asyncrl.learner.cost import Timing, analytic_ratio, fitted_ratio, work_of
from asyncrl.learner.engine import Engine
from asyncrl.learner.probe_rows import probe_row

__all__ = ["measured_ratio", "pair_cost"]

log = logging.getLogger(__name__)
DEFAULT_HIDDEN_SIZE = 1024
ROWS_SHORTER_BY = (1, 4, 16)
ROUNDS = 3  # after one that warms up
MAX_PASS_S = 0.5


def pair_cost(engine: Engine, control: Control, config: Config, model_dir: str) -> float:
    """Cost of a token pair in units of a token, the same on every rank; collective.

    From operation counts where nothing depends on it (one replica) or a measurement would keep a run from repeating itself (lockstep).
    """
    model = json.loads((Path(model_dir) / "config.json").read_text())
    analytic = analytic_ratio(int(model.get("hidden_size", DEFAULT_HIDDEN_SIZE)))
    if engine.data_parallel_size == 1 or config.queue.schedule == "lockstep":
        return analytic
    cap_tokens = config.learner.micro_batch_tokens
    longest = min(cap_tokens, int(model.get("max_position_embeddings", cap_tokens)))
    measured = measured_ratio(engine, control, cap_tokens=cap_tokens, longest_tokens=longest, vocab_size=int(model.get("vocab_size", 1)))
    return analytic if measured is None else measured


def measured_ratio(engine: Engine, control: Control, *, cap_tokens: int, longest_tokens: int, vocab_size: int) -> float | None:
    """Times forward passes of random rows; the leader's clock decides for all.

    None, with the reason in the log, where passes take too long to try or their times do not tell tokens from pairs.
    """
    lengths = sorted({longest_tokens // times for times in ROWS_SHORTER_BY if longest_tokens // times >= 2})
    probes = [_probe(length, cap_tokens // length, vocab_size) for length in lengths]
    cuda: Any = torch.cuda
    devices = [cuda.current_device()] if cuda.is_initialized() else []
    started_s = time.monotonic()
    with torch.random.fork_rng(devices=devices):
        one_row = probes[0][:1]
        _pass_s(engine, one_row)
        expected_s = _pass_s(engine, one_row) * len(probes[0])
        if control.any(control.is_leader and expected_s > MAX_PASS_S):
            log.info("cost of attention from operation counts: a pass over %d tokens takes too long to try", cap_tokens)
            return None
        rounds = [[_pass_s(engine, probe) for probe in probes] for _ in range(1 + ROUNDS)][1:]
    timings = [
        Timing(tokens=tokens, pairs=pairs, seconds=statistics.median(seconds))
        for (tokens, pairs), seconds in zip((_work(probe) for probe in probes), zip(*rounds, strict=True), strict=True)
    ]
    answer = control.broadcast(msgspec.msgpack.encode(fitted_ratio(timings)))
    ratio = msgspec.msgpack.decode(answer, type=float | None)
    if ratio is None:
        log.warning("cost of attention from operation counts: %s tell tokens from pairs no better", timings)
    else:
        log.info("a token pair costs %.2e of a token, by passes of %.1f s in all", ratio, time.monotonic() - started_s)
    return ratio


def _pass_s(engine: Engine, rows: Sequence[Row]) -> float:
    started_s = time.perf_counter()
    engine.infer_batch(Batch(rows_N=tuple(rows), denominators=Denominators(tokens=0, trajectories=0)), should_stop=lambda: False)
    return time.perf_counter() - started_s


def _work(rows: Sequence[Row]) -> tuple[int, int]:
    return work_of([len(row.trajectory) for row in rows], 0)


def _probe(length: int, number: int, vocab_size: int) -> list[Row]:
    ids = np.random.default_rng(length).integers(0, vocab_size, (number, length))
    return [probe_row(ids[k], 1, group_id=f"probe-{k}", ticket=k) for k in range(number)]
