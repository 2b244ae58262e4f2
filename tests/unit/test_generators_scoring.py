"""Fault B16: whatever a reward does, its sibling alone is removed, with a reason."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from asyncrl.generators.scoring import RemovalReason, Removed, Scored, Scorer
from asyncrl.tasks import Prompt

PROMPT = Prompt(prompt_id="p", prompt="1+1=", answer="2")


class Reward:
    name = "fake"

    def __init__(self, function):
        self.score = lambda prompt, response: function(response)


def score(function, response="x", timeout_s=5.0):
    return asyncio.run(Scorer(Reward(function), timeout_s).score(PROMPT, response))


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", True, np.True_, 1e9, 10**400, [1.0]])
def test_b16_a_reward_that_is_no_usable_number_removes_its_sibling_and_is_never_coerced(value):
    removed = score(lambda response: (value, {}))
    assert isinstance(removed, Removed)
    assert removed.reason is RemovalReason.REWARD_UNUSABLE


@pytest.mark.parametrize("value", [1, 0.25, np.float32(0.5), -3])
def test_numbers_of_python_and_numpy_are_rewards(value):
    assert score(lambda response: (value, {"part": 0.5})) == Scored(float(value), {"part": 0.5})


def test_b16_a_bad_part_removes_the_sibling_too():
    assert score(lambda response: (1.0, {"part": None})).reason is RemovalReason.REWARD_UNUSABLE


def test_b16_a_reward_without_parts_is_refused_with_what_was_met():
    removed = score(lambda response: 1.0)
    assert removed.reason is RemovalReason.REWARD_UNUSABLE and "met 1.0" in removed.detail


@pytest.mark.parametrize("error", [ValueError("boom"), TimeoutError("boom"), StopIteration("boom"), SystemExit("boom")])
def test_b16_a_reward_that_raises_removes_its_sibling_with_the_error(error):
    def raises(response):
        raise error

    removed = score(raises)
    assert removed == Removed(RemovalReason.REWARD_RAISED, f"{type(error).__name__}: boom")


def test_b16_a_reward_that_hangs_is_given_up_after_its_time_and_the_others_are_scored():
    release = threading.Event()

    async def scene():
        scorer = Scorer(Reward(lambda response: (release.wait(30) and 0.0, {}) if response == "hang" else (1.0, {})), 0.2)
        started_s = time.monotonic()
        outcomes = await asyncio.gather(*(scorer.score(PROMPT, response) for response in ["hang", "a", "hang", "b"]))
        return outcomes, scorer.hung, time.monotonic() - started_s

    outcomes, hung, took_s = asyncio.run(scene())
    release.set()
    assert [getattr(outcome, "reason", "scored") for outcome in outcomes] == ["reward_timeout", "scored", "reward_timeout", "scored"]
    assert hung == 2 and took_s < 5.0


def test_more_hung_rewards_than_slots_still_let_the_next_one_through():
    release = threading.Event()

    async def scene():
        scorer = Scorer(Reward(lambda response: (release.wait(30) and 0.0, {}) if response == "hang" else (1.0, {})), 0.05)
        await asyncio.gather(*(scorer.score(PROMPT, "hang") for _ in range(40)))
        return await scorer.score(PROMPT, "a")

    outcome = asyncio.run(scene())
    release.set()
    assert outcome == Scored(1.0, {})
