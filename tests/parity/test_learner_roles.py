"""Actor, reference and critic are one worker in three configurations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from learner_support import batch_of, one_rank, random_groups, rows_of, settings, spec, tiny_model_dir

from asyncrl.algorithms.values import VALUE_STATISTICS
from asyncrl.errors import UnsupportedError
from asyncrl.learner.batch import Row
from asyncrl.learner.engine import Engine, EngineSpec
from asyncrl.learner.objective import PolicyObjective, ValueObjective
from asyncrl.learner.registry import EngineRegistry
from asyncrl.learner.roles import ACTOR, CRITIC, REFERENCE, ModelWorker, Role

ROWS = rows_of(random_groups(3, 4, seed=5))


def engine_of(role: Role, what: EngineSpec) -> Engine:
    engine = EngineRegistry.find(model_type=role.model_type, backend="fsdp2", device="cpu")(what)
    engine.initialize()
    return engine


def predictions(worker: ModelWorker, rows: tuple[Row, ...] = ROWS) -> np.ndarray:
    return np.concatenate(worker.infer_batch(rows, lambda: False).predictions_N)


def train(worker: ModelWorker) -> None:
    worker.train_mini_batch(batch_of(ROWS), PolicyObjective(settings(), "behavior"), lambda: False)


def test_a_reference_of_its_own_stays_where_the_actor_began(tmp_path: Path):
    one_rank()
    model = spec(tiny_model_dir(tmp_path), warmup_steps=0)
    actor = ModelWorker(engine_of(ACTOR, model), ACTOR)
    reference = ModelWorker(engine_of(REFERENCE, replace(model, trained=False)), REFERENCE)
    start = predictions(actor)
    train(actor)
    np.testing.assert_array_equal(predictions(reference), start)
    assert np.abs(predictions(actor) - start).max() > 1e-3


def test_an_actor_that_trains_adapters_is_its_own_reference_with_them_off(tmp_path: Path):
    one_rank()
    model_dir = tiny_model_dir(tmp_path)
    plain = ModelWorker(engine_of(ACTOR, spec(model_dir)), ACTOR)
    engine = engine_of(ACTOR, spec(model_dir, lora_rank=4, warmup_steps=0, learning_rate=0.01))
    actor, reference = ModelWorker(engine, ACTOR), ModelWorker(engine, REFERENCE)
    train(actor)
    train(actor)  # the first step moves B away from zero, from then on A is trained too
    np.testing.assert_array_equal(predictions(reference), predictions(plain))
    assert np.abs(predictions(actor) - predictions(plain)).max() > 1e-3


def test_a_reference_is_never_trained(tmp_path: Path):
    one_rank()
    engine = engine_of(REFERENCE, replace(spec(tiny_model_dir(tmp_path)), trained=False))
    with pytest.raises(UnsupportedError, match="the role of reference is never trained"):
        train(ModelWorker(engine, REFERENCE))
    with pytest.raises(UnsupportedError, match="the role of actor is trained"):
        ModelWorker(engine, ACTOR)


def test_without_adapters_there_is_nothing_to_switch_off(tmp_path: Path):
    one_rank()
    engine = engine_of(ACTOR, spec(tiny_model_dir(tmp_path)))
    with pytest.raises(UnsupportedError, match=r"set learner\.lora_rank"):
        engine.infer_batch(batch_of(ROWS), should_stop=lambda: False, adapters=False)


def test_a_critic_learns_to_predict_what_its_rows_returned(tmp_path: Path):
    one_rank()
    critic = ModelWorker(engine_of(CRITIC, spec(tiny_model_dir(tmp_path), learning_rate=0.01, warmup_steps=0)), CRITIC)
    rows = tuple(replace(row, returns=np.full(len(row.trajectory), row.advantage, np.float32)) for row in ROWS)
    errors = []
    for _ in range(30):
        output = critic.train_mini_batch(batch_of(rows), ValueObjective(), lambda: False)
        errors.append(float(output.sums[VALUE_STATISTICS.index("error_square")] / output.sums[VALUE_STATISTICS.index("tokens")]))
    assert errors[-1] < 0.5 * errors[0]
    values = critic.infer_batch(rows, lambda: False).predictions_N
    for row, found in zip(rows, values, strict=True):
        assert found[~row.trajectory.loss_mask].tolist() == [0.0] * row.trajectory.prompt_length
