"""The vLLM adapter against a fake engine: answers, failures, and the modes of an update."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from fake_vllm import FakeVllm, manifest, request

from asyncrl.config import Config
from asyncrl.errors import EngineError, SyncError, UnsupportedError
from asyncrl.generators.vllm_api import span_api
from asyncrl.generators.vllm_cut import CutSpans
from asyncrl.generators.vllm_engine import VllmEngine
from asyncrl.trajectory import VersionSpan


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch):
    monkeypatch.setattr("asyncrl.generators.vllm_engine.sampling_parameters", lambda request: None)


@contextlib.asynccontextmanager
async def engine_on(lengths, kind=FakeVllm, **sync):
    engine = VllmEngine(Config.model_validate({"sync": sync}), "")
    engine._llm = fake = kind({f"r{i}": length for i, length in enumerate(lengths)}, 1)
    engine._api, engine.version = CutSpans(), 0
    try:
        yield engine
    finally:
        for task in fake.tasks:
            task.cancel()


class Changed(FakeVllm):
    """Changes every answer before it goes out."""

    def change(self, output):
        raise NotImplementedError  # each test says how its engine lies

    async def generate(self, prompt, parameters, request_id):
        async for output in super().generate(prompt, parameters, request_id):
            self.change(output)
            yield output


def sample_one(kind):
    async def scene():
        async with engine_on([3], kind) as engine:
            return await asyncio.wait_for(engine.sample(request(0)), 10)

    return asyncio.run(scene())


def test_b20_requests_that_finish_out_of_order_get_their_own_answers():
    async def scene():
        async with engine_on([30, 2, 9]) as engine:
            return await asyncio.gather(*(engine.sample(request(i)) for i in range(3)))

    results = asyncio.run(scene())
    assert [(result.request_id, len(result.token_ids)) for result in results] == [("r0", 30), ("r1", 2), ("r2", 9)]


def test_b20_an_answer_to_another_request_or_another_prompt_is_an_error():
    class OtherRequest(Changed):
        def change(self, output):
            output.request_id = "r7#0"

    class OtherPrompt(Changed):
        def change(self, output):
            output.prompt_token_ids = [1, 3]

    for kind in (OtherRequest, OtherPrompt):
        with pytest.raises(EngineError, match="answers the request that it was asked; r0#0"):
            sample_one(kind)


def test_b06_a_token_that_came_without_log_prob_is_marked_as_such():
    class Short(Changed):
        def change(self, output):
            output.outputs[0].logprobs = output.outputs[0].logprobs[:2]

    class Gap(Changed):
        def change(self, output):
            output.outputs[0].logprobs[1] = {}

    assert np.isnan(sample_one(Short).logprobs).tolist() == [False, False, True]
    assert np.isnan(sample_one(Gap).logprobs).tolist() == [False, True, False]


def test_a_response_that_ends_by_an_abort_nobody_asked_for_is_an_error():
    class Aborted(Changed):
        def change(self, output):
            output.outputs[0].finish_reason = "abort"

    with pytest.raises(EngineError, match="ends a response by stop or length; r0#0 ended by abort"):
        sample_one(Aborted)


def test_an_engine_that_raises_fails_the_request_with_its_error():
    class Dead(FakeVllm):
        async def generate(self, prompt, parameters, request_id):
            raise RuntimeError("EngineCore encountered an issue")
            yield

    with pytest.raises(EngineError, match="vLLM failed on r0#0: RuntimeError: EngineCore encountered an issue"):
        sample_one(Dead)


def test_an_update_that_fails_half_way_makes_the_engine_unusable():
    class Broken(FakeVllm):
        async def collective_rpc(self, method, args):
            raise RuntimeError("no space left")

    async def scene():
        async with engine_on([3], Broken) as engine:
            await engine.load(manifest(1, "recompute"))

    with pytest.raises(EngineError, match="version 1 could not be loaded: RuntimeError: no space left"):
        asyncio.run(scene())


def test_a_drain_that_takes_too_long_fails_the_update_and_the_engine_goes_on_unchanged():
    async def scene():
        async with engine_on([10**6, 4], commit_timeout_s=0.05, in_flight="drain") as engine:
            long = asyncio.ensure_future(engine.sample(request(0)))
            await asyncio.sleep(0.01)
            with pytest.raises(SyncError, match=r"1 requests did not drain within sync\.commit_timeout_s"):
                await engine.load(manifest(1, "drain"))
            after = await asyncio.wait_for(engine.sample(request(1)), 10)
            long.cancel()
            return engine.version, after.version_spans

    assert asyncio.run(scene()) == (0, (VersionSpan(0, 0),))


def test_in_flight_tokens_are_counted_by_the_version_that_sampled_them_and_a_dead_engine_is_an_error():
    async def scene():
        async with engine_on([10**6]) as engine:
            task = asyncio.ensure_future(engine.sample(request(0)))
            while not engine.in_flight_tokens().get(0):
                await asyncio.sleep(0)
            await engine.load(manifest(1, "recompute"))
            before = engine.in_flight_tokens()
            while not engine.in_flight_tokens().get(1):
                await asyncio.sleep(0)
            after = engine.in_flight_tokens()
            task.cancel()
            engine._llm.errored = True
            with pytest.raises(EngineError, match="engine process has died"):
                engine.in_flight_tokens()
            return before, after

    before, after = asyncio.run(scene())
    assert set(before) == {0} and set(after) == {0, 1} and after[0] == before[0]


def test_the_api_generation_is_told_by_what_the_engine_can_do():
    class Old:
        pass

    class New:
        async def update_weight_version(self, label):
            """As vLLM 0.32 has it."""

    assert (span_api(Old).name, span_api(New).name) == ("cut", "exact")


def test_a_temperature_that_vllm_would_raise_in_silence_is_refused():
    with pytest.raises(UnsupportedError, match=r"0\.01 or hotter; met generator\.temperature=0\.001"):
        VllmEngine(Config.model_validate({"generator": {"temperature": 0.001}}), "")
