"""FSDP2 on one rank against one plain Hugging Face process that was written here; layouts of several ranks are in ``engines``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines.reference import BONUS, plain_run
from learner_support import batch_of, one_rank, random_groups, rows_of, settings, spec, tiny_model_dir

from asyncrl.learner.batch import Batch, Row
from asyncrl.learner.engine import StepAbandoned
from asyncrl.learner.fsdp2 import FSDP2Engine
from asyncrl.learner.objective import PolicyObjective
from asyncrl.learner.packing import attention_mask, pack

STEPS = 3
EPSILON = 1e-5  # large enough that a gradient of rounding size does not become a full Adam step


def engine_run(model_dir: str, batches: list[Batch], *, bonus: float = 0.0, dtype: str = "float32", **learner: Any):
    engine = FSDP2Engine(spec(model_dir, dtype=dtype, epsilon=EPSILON, **learner))
    engine.initialize()
    outputs = [train(engine, batch, bonus=bonus) for batch in batches]
    return engine, outputs


def train(engine: FSDP2Engine, batch: Batch, *, bonus: float = 0.0):
    objective = PolicyObjective(settings(entropy_bonus=bonus), "behavior")
    return engine.train_batch(batch, objective, should_stop=lambda: False, rescale=lambda sums: objective.rescale(sums, batch.denominators))


def loss_of(output: Any) -> float:
    return float(output.sums[3])


def batches_of(seed: int = 0) -> list[tuple[Row, ...]]:
    return [rows_of(random_groups(4, 4, seed=seed + step)) for step in range(STEPS)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_packed_log_probs_equal_those_of_one_sequence_alone(tmp_path: Path, attention: str, kind: str):
    one_rank()
    engine, _ = engine_run(tiny_model_dir(tmp_path, kind=kind), [], attention=attention)
    rows = rows_of(random_groups(5, 3, seed=9))
    packed = engine.infer_batch(batch_of(rows), should_stop=lambda: False).predictions_N
    for row, together in zip(rows, packed, strict=True):
        (alone,) = engine.infer_batch(batch_of((row,)), should_stop=lambda: False).predictions_N
        np.testing.assert_allclose(together, alone, atol=1e-5)
        assert together[~row.trajectory.loss_mask].tolist() == [0.0] * (len(together) - row.trajectory.num_sampled_tokens)
        assert (together[row.trajectory.loss_mask] < 0).all()


def test_b04_log_prob_i_is_that_of_token_i(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    one_rank()
    model_dir = tiny_model_dir(tmp_path)
    engine, _ = engine_run(model_dir, [])
    row = rows_of(random_groups(1, 2, seed=1))[0]
    (found,) = engine.infer_batch(batch_of((row,)), should_stop=lambda: False).predictions_N
    ids = torch.from_numpy(row.trajectory.input_ids.astype(np.int64))
    logits = AutoModelForCausalLM.from_pretrained(model_dir)(input_ids=ids[None]).logits[0]
    for i in np.flatnonzero(row.trajectory.loss_mask):
        assert found[i] == pytest.approx(torch.log_softmax(logits[i - 1], -1)[ids[i]].item(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_b01_the_ratio_of_an_unchanged_policy_is_one_at_its_temperature(tmp_path: Path, temperature: float):
    from dataclasses import replace

    one_rank()
    engine, _ = engine_run(tiny_model_dir(tmp_path), [])
    rows = tuple(
        replace(row, trajectory=replace(row.trajectory, temperature=temperature if i % 2 else 1.0))
        for i, row in enumerate(rows_of(random_groups(2, 4, seed=2)))
    )
    scored = engine.infer_batch(batch_of(rows), should_stop=lambda: False).predictions_N
    own = tuple(replace(row, trajectory=replace(row.trajectory, behavior_logprobs=s)) for row, s in zip(rows, scored, strict=True))
    output = train(engine, batch_of(own))
    tokens = float(output.sums[0])
    assert float(output.sums[5]) / tokens < 1e-5  # mean |log ratio|


def test_a_single_rank_equals_a_plain_loop_over_the_same_packs_bit_for_bit(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    one_rank()
    model_dir, rows = tiny_model_dir(tmp_path), batches_of(seed=20)
    engine, outputs = engine_run(model_dir, [batch_of(r) for r in rows])
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=EPSILON, weight_decay=0.0, fused=True)
    for step, mine in enumerate(rows):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 2)
        tokens = sum(row.trajectory.num_sampled_tokens for row in mine)
        for micro in pack(mine, cap_tokens=48, shared_prompt=True):
            hidden = model.model(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                attention_mask=attention_mask(micro, additive=None),
                use_cache=False,
            ).last_hidden_state[0]
            logprobs = torch.log_softmax(model.lm_head(hidden[micro.sources]).float() / micro.temperatures[:, None], -1)
            ratio = (logprobs.gather(1, micro.targets[:, None])[:, 0] - micro.behavior_logprobs).exp()
            gain = torch.minimum(ratio * micro.advantages, ratio.clamp(0.8, 1.2) * micro.advantages)
            (-gain * (torch.ones(len(gain)) / tokens)).sum().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == outputs[step].grad_norm
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(model.named_parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.named_tensors())


def test_b26_a_step_without_rows_has_zero_loss_and_moves_nothing(tmp_path: Path):
    one_rank()
    engine, _ = engine_run(tiny_model_dir(tmp_path), [])
    before = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    output = train(engine, batch_of(()))
    assert (loss_of(output), output.grad_norm, output.stepped, output.skipped) == (0.0, 0.0, False, "no trained tokens")
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_tensors())
    assert engine.optimizer_steps == 0


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_reported(tmp_path: Path):
    from dataclasses import replace

    one_rank()
    engine, _ = engine_run(tiny_model_dir(tmp_path), [])
    before = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    rows = tuple(replace(row, advantage=float("inf")) for row in rows_of(random_groups(1, 2, seed=3)))
    output = train(engine, batch_of(rows))
    assert not output.stepped
    assert "gradient norm is" in output.skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_tensors())
    assert train(engine, batch_of(rows_of(random_groups(1, 2, seed=3)))).stepped


def test_an_abandoned_step_leaves_the_weights_and_the_next_one_untouched(tmp_path: Path):
    one_rank()
    model_dir, rows = tiny_model_dir(tmp_path), batches_of(seed=30)
    engine, _ = engine_run(model_dir, [])
    answers = iter([False, True])
    with pytest.raises(StepAbandoned):
        engine.train_batch(
            batch_of(rows[0]),
            PolicyObjective(settings(), "behavior"),
            should_stop=lambda: next(answers),
            rescale=lambda sums: 1.0,
        )
    _, expected = engine_run(model_dir, [batch_of(rows[0])])
    assert train(engine, batch_of(rows[0])).grad_norm == expected[0].grad_norm


def test_scoring_does_not_hide_the_next_optimizer_step(tmp_path: Path):
    one_rank()
    model_dir, rows = tiny_model_dir(tmp_path), batches_of(seed=40)
    engine, _ = engine_run(model_dir, [])
    before = engine.infer_batch(batch_of(rows[1]), should_stop=lambda: False).predictions_N
    train(engine, batch_of(rows[0]))
    after = engine.infer_batch(batch_of(rows[1]), should_stop=lambda: False).predictions_N
    fresh, _ = engine_run(model_dir, [batch_of(rows[0])])
    expected = fresh.infer_batch(batch_of(rows[1]), should_stop=lambda: False).predictions_N
    assert not np.array_equal(before[0], after[0])
    assert all(np.array_equal(a, e) for a, e in zip(after, expected, strict=True))


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(tmp_path: Path):
    one_rank()
    model_dir, rows = tiny_model_dir(tmp_path), batches_of()
    plain = plain_run(model_dir, rows, "adamw", {"learning_rate": 1e-3, "epsilon": EPSILON, "grad_clip": 1.0})
    engine, outputs = engine_run(model_dir, [batch_of(r) for r in rows], bonus=BONUS, dtype="bfloat16", warmup_steps=0)
    np.testing.assert_allclose([loss_of(o) for o in outputs], plain.losses, atol=0.03)
    assert {p.dtype for p in engine.packed.parameters()} == {torch.float32}
    assert {tensor.dtype for _, tensor in engine.named_tensors()} == {torch.bfloat16}
