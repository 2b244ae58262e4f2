"""From a ticket to a group with a scripted engine."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.errors import DataError
from asyncrl.generators.engine import SampleResult
from asyncrl.generators.groups import GroupSampler, UnusablePromptError, prompt_ids, sibling_seed
from asyncrl.generators.scoring import RemovalReason, Scorer
from asyncrl.queue.messages import Ticket
from asyncrl.tasks import Prompt
from asyncrl.trajectory import VersionSpan


class Engine:
    """Answers each request with four tokens; ``script`` changes the answer of a sibling."""

    name, logprobs_mode, batch_invariant, version, max_model_len = "fake", "processed", False, 3, 32

    def __init__(self, script=None):
        self.script, self.asked, self.running, self.most = script or {}, [], 0, 0

    def encode(self, text):
        text.encode()
        return [ord(letter) % 50 for letter in text]

    def encode_chat(self, messages):
        if messages[-1]["role"] != "user":
            raise DataError("the template wants a user turn")
        return [1, 2, 3]

    async def sample(self, request):
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        fields = {
            "token_ids": np.array([5, 6, 7, 8], dtype=np.int32),
            "logprobs": np.array([-1.0, -2.0, -3.0, -4.0], dtype=np.float32),
            "version_spans": (VersionSpan(0, 3), VersionSpan(2, 4)),
            "text": f"s{request.request_id[-1]}",
            "finish_reason": "length",
        }
        fields |= self.script.get(int(request.request_id[-1]), {})
        return SampleResult(request_id=request.request_id, prompt_ids=request.prompt_ids, **fields)


class Reward:
    name = "fake"

    def __init__(self, values):
        self.values = values

    def score(self, prompt, response):
        return self.values[int(response[-1])], {"part": 1.0}


def ticket(prompt="ab", **fields):
    values = {
        "ticket": 7, "group_id": "g7", "attempt": 1, "prompt_id": "p7", "prompt": prompt, "is_chat": False, "answer": "", "extra": "{}",
        "seed": 11, "deadline_s": 60.0, "not_before_version": 0,
    }  # fmt: skip
    return Ticket(**(values | fields))


def sample(engine, rewards, size, sequential=False, **fields):
    config = Config.model_validate({"algorithm": {"group_size": size}, "generator": {"max_new_tokens": 4, "temperature": 0.7}})
    sampler = GroupSampler(config, engine, Scorer(Reward(rewards), 5.0), "generator-0", 2, sequential=sequential)
    return asyncio.run(sampler.sample(ticket(**fields))), sampler


def test_a_sibling_becomes_a_trajectory_with_the_ids_the_engine_returned_and_spans_moved_behind_the_prompt():
    group, sampler = sample(Engine(), [0.25, 0.75], 2)
    first = group.trajectories[0]
    assert first.input_ids.tolist() == [47, 48, 5, 6, 7, 8]
    assert first.loss_mask.tolist() == [False, False, True, True, True, True]
    assert first.behavior_logprobs.tolist() == [0.0, 0.0, -1.0, -2.0, -3.0, -4.0]
    assert first.version_spans == (VersionSpan(2, 3), VersionSpan(4, 4))
    assert [t.reward for t in group.trajectories] == [0.25, 0.75]
    assert (first.ticket, first.attempt, first.incarnation, first.reward_parts) == (7, 1, 2, {"part": 1.0})
    assert first.temperature == pytest.approx(0.7) and sampler.sampled_tokens == 8


def test_siblings_have_seeds_of_their_own_that_do_not_depend_on_the_attempt():
    engine = Engine()
    sample(engine, [0.0] * 4, 4, attempt=0)
    sample(engine, [0.0] * 4, 4, attempt=2)
    seeds = [request.seed for request in engine.asked]
    assert seeds[:4] == seeds[4:] == [sibling_seed(11, sibling) for sibling in range(4)]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**63 for seed in seeds)


def test_b06_a_token_without_a_log_prob_of_the_engine_is_never_trained():
    cut = {"logprobs": np.array([-1.0, -2.0, -3.0, np.nan], dtype=np.float32)}
    group, _ = sample(Engine({0: cut}), [0.0, 1.0], 2)
    assert group.trajectories[0].loss_mask.tolist() == [False, False, True, True, True, False]
    assert group.trajectories[0].behavior_logprobs[-1] == 0.0
    assert group.trajectories[1].loss_mask.tolist() == [False, False, True, True, True, True]


def test_a_response_without_any_log_prob_removes_its_sibling():
    nothing = {"logprobs": np.full(4, np.nan, dtype=np.float32)}
    group, sampler = sample(Engine({1: nothing}), [0.0, 1.0, 0.5], 3)
    assert [t.sibling for t in group.trajectories] == [0, 2]
    assert sampler.removed == {RemovalReason.NO_LOGPROBS: 1}


def test_b16_one_bad_reward_removes_one_sibling_and_the_group_keeps_the_others():
    group, sampler = sample(Engine(), [1.0, float("nan"), 0.0, 1.0], 4)
    assert [(t.sibling, t.reward) for t in group.trajectories] == [(0, 1.0), (2, 0.0), (3, 1.0)]
    assert sampler.removed == {RemovalReason.REWARD_UNUSABLE: 1}


def test_b16_a_group_left_with_one_sibling_is_given_back_with_the_reasons():
    with pytest.raises(DataError, match="1 of 2 siblings are left: reward_unusable"):
        sample(Engine(), [1.0, None], 2)


def test_a_group_of_one_lives_on_one_sibling():
    group, _ = sample(Engine(), [1.0], 1)
    assert len(group.trajectories) == 1


def test_sequential_sampling_has_one_request_at_a_time_in_order_of_sibling():
    engine = Engine()
    sample(engine, [0.0] * 4, 4, sequential=True)
    assert engine.most == 1 and [request.request_id[-1] for request in engine.asked] == list("0123")
    engine = Engine()
    sample(engine, [0.0] * 4, 4, sequential=False)
    assert engine.most == 4


@pytest.mark.parametrize("fields", [{"not_before_version": 4}, {"exact_version": 2}, {"exact_version": 4}])
def test_a_ticket_for_another_version_is_not_sampled(fields):
    engine = Engine()
    with pytest.raises(DataError, match="this generator serves 3"):
        sample(engine, [0.0, 1.0], 2, **fields)
    assert engine.asked == []


@pytest.mark.parametrize(
    ("prompt", "is_chat", "fault"),
    [
        ("", False, "has none"),
        ("x" * 29, False, "has 29 and generator.max_new_tokens=4"),
        ("\ud800", False, "cannot be encoded"),
        (json.dumps([{"role": "assistant", "content": "hm"}]), True, "the template wants a user turn"),
        ("not json", True, "cannot be encoded"),
    ],
)
def test_a_prompt_that_no_attempt_can_sample_is_unusable(prompt, is_chat, fault):
    with pytest.raises(UnusablePromptError, match=fault):
        prompt_ids(Engine(), Prompt(prompt_id="p", prompt=prompt, is_chat=is_chat), 4)


def test_a_prompt_of_exactly_the_longest_length_is_taken():
    assert len(prompt_ids(Engine(), Prompt(prompt_id="p", prompt="x" * 28), 4)) == 28
