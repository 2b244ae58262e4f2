"""The worker on a real engine of one rank: which proximal policy it takes, what it counts, what it corrects."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_support import batch_of, one_rank, random_groups, rows_of, settings, spec, tiny_model_dir

from asyncrl.config import AlgorithmConfig
from asyncrl.errors import DataError
from asyncrl.learner.control import Control
from asyncrl.learner.cost_probe import measured_ratio
from asyncrl.learner.fsdp2 import FSDP2Engine
from asyncrl.learner.objective import PolicyObjective
from asyncrl.learner.plan import PlanSettings, StepPlan, plan_step
from asyncrl.learner.worker import TrainingWorker
from asyncrl.trajectory import TrajectoryGroup


def never() -> bool:
    return False


def worker_of(folder: Path, **algorithm: Any) -> TrainingWorker:
    one_rank()
    engine = FSDP2Engine(spec(tiny_model_dir(folder), learning_rate=1e-2, warmup_steps=0))
    engine.initialize()
    return TrainingWorker(engine, AlgorithmConfig(**algorithm))


def step_of(
    groups: list[TrajectoryGroup], *, mini_batches: int = 1, recompute: bool = False
) -> tuple[StepPlan, dict[int, TrajectoryGroup]]:
    some = PlanSettings(replicas=1, mini_batches=mini_batches, keep_no_signal=False, shared_prompt=True, quadratic=0.0)
    return plan_step(0, [g.meta() for g in groups], some, recompute=recompute), {g.ticket: g for g in groups}


def on_policy(worker: TrainingWorker, groups: list[TrajectoryGroup], shift: float = 0.0) -> list[TrajectoryGroup]:
    """The same groups with the engine's own log-probs, shifted by a constant, as behaviour."""
    scored = iter(worker.infer_batch(rows_of(groups), never).predictions_N)
    fresh = []
    for group in groups:
        members = (
            replace(t, behavior_logprobs=np.where(t.loss_mask, next(scored) - np.float32(shift), np.float32(0.0)))
            for t in group.trajectories
        )
        fresh.append(TrajectoryGroup(trajectories=tuple(members)))
    return fresh


def weights(worker: TrainingWorker) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in worker.engine.named_tensors()])


def test_b28_bypass_measures_the_ratio_to_the_policy_that_sampled(tmp_path: Path):
    worker = worker_of(tmp_path)
    groups = on_policy(worker, random_groups(3, 4, seed=5), shift=0.1)
    result = worker.train_step(*step_of(groups), never)
    assert result.statistics["abs_log_ratio"] == pytest.approx(0.1, abs=1e-5)
    assert result.statistics["mismatch_kl"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)
    assert result.updates == 1


def test_recompute_with_one_update_takes_the_current_policy_without_a_pass_of_its_own(tmp_path: Path):
    worker = worker_of(tmp_path)
    groups = on_policy(worker, random_groups(3, 4, seed=5), shift=0.1)
    worker.infer_batch = None
    result = worker.train_step(*step_of(groups, recompute=True), never)
    assert result.statistics["abs_log_ratio"] == 0.0
    assert result.statistics["correction_mean"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert result.statistics["mismatch_kl"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)


def test_recompute_with_more_updates_keeps_the_weights_of_the_start_as_proximal_policy(tmp_path: Path):
    worker = worker_of(tmp_path, mini_batches=2, epochs=2)
    groups = on_policy(worker, random_groups(4, 4, seed=6), shift=0.1)
    result = worker.train_step(*step_of(groups, mini_batches=2, recompute=True), never)
    assert result.updates == 4
    assert result.statistics["drift"] > 1e-3  # the last update is no longer at the starting weights
    assert result.statistics["correction_mean"] == pytest.approx(math.exp(0.1), rel=1e-4)  # proximal/behaviour does not move
    assert result.statistics["mismatch_kl"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)  # of the first update


def test_an_on_policy_batch_has_no_mismatch_and_a_full_effective_sample(tmp_path: Path):
    worker = worker_of(tmp_path)
    statistics = worker.train_step(*step_of(on_policy(worker, random_groups(3, 4, seed=7))), never).statistics
    assert statistics["mismatch_kl"] < 1e-9
    assert statistics["ess"] == pytest.approx(1.0, abs=1e-6)
    assert statistics["clip_fraction"] == 0.0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_b26_masked_tokens_leave_the_denominator_of_the_gradient_too(tmp_path: Path, aggregation: str):
    worker = worker_of(tmp_path)
    rows = rows_of(on_policy(worker, random_groups(3, 4, seed=8)))
    # half of the trajectories were sampled by a policy far away: their weights e^1 are beyond the cap
    far = tuple(
        replace(row, trajectory=replace(row.trajectory, behavior_logprobs=row.trajectory.behavior_logprobs - row.trajectory.loss_mask))
        if row.trajectory.sibling < 2
        else row
        for row in rows
    )
    near = tuple(row for row in rows if row.trajectory.sibling >= 2)
    masked = gradient_norm(worker, far, "mask", aggregation)
    assert masked == pytest.approx(gradient_norm(worker, near, "off", aggregation), rel=1e-4)


def gradient_norm(worker: TrainingWorker, rows: tuple[Any, ...], correction: str, aggregation: str) -> float:
    engine, batch = worker.engine, batch_of(rows)
    objective = PolicyObjective(settings(correction=correction, aggregation=aggregation), "current")
    engine.optimizer_step = lambda: (0.0, False)
    engine.optimizer_zero_grad()
    output = engine.forward_backward_batch(batch, objective, forward_only=False, should_stop=never)
    assert output.sums is not None
    factor = objective.rescale(output.sums, batch.denominators)
    assert factor is not None
    engine.scale_gradients(factor)
    squares = sum(float(p.grad.square().sum()) for p in engine.packed.parameters())
    engine.optimizer_zero_grad()
    return math.sqrt(squares)


def test_measuring_costs_changes_nothing_that_is_trained(tmp_path: Path):
    groups = step_of(random_groups(3, 4, seed=12))
    plain, measured = (worker_of(tmp_path / name) for name in ("plain", "measured"))
    rng = torch.get_rng_state()
    measured_ratio(measured.engine, Control(0, 1, 1.0), cap_tokens=48, longest_tokens=48, vocab_size=64)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in measured.engine.packed.parameters())
    assert plain.train_step(*groups, never) == measured.train_step(*groups, never)
    assert torch.equal(weights(plain), weights(measured))


def test_epochs_and_mini_batches_make_that_many_optimizer_steps(tmp_path: Path):
    worker = worker_of(tmp_path, epochs=3)
    result = worker.train_step(*step_of(random_groups(4, 4, seed=9), mini_batches=2), never)
    assert result.updates == 6
    assert worker.engine.optimizer_steps == 6


def test_b26_a_batch_without_signal_runs_and_moves_nothing(tmp_path: Path):
    worker = worker_of(tmp_path)
    group = random_groups(1, 4, seed=10)[0]
    flat = TrajectoryGroup(trajectories=tuple(replace(t, reward=0.35) for t in group.trajectories))
    before = weights(worker)
    result = worker.train_step(step_of([flat])[0], {}, never)
    assert (result.updates, result.statistics["loss"], result.statistics["grad_norm"]) == (0, 0.0, 0.0)
    assert result.skipped == ("no trained tokens",)
    assert torch.equal(weights(worker), before)


def test_a_payload_with_more_tokens_than_planned_is_refused_before_training(tmp_path: Path):
    worker = worker_of(tmp_path)
    plan, groups = step_of(random_groups(1, 4, seed=11))
    before = weights(worker)
    with pytest.raises(DataError, match="was planned with"):
        worker.train_step(plan, {0: TrajectoryGroup(trajectories=groups[0].trajectories[:3])}, never)
    assert torch.equal(weights(worker), before)
