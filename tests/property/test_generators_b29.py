"""Fault B29: versions are stamped where they begin, whenever updates come. The adapter runs on a fake of vLLM that knows the truth."""

from __future__ import annotations

import asyncio

import pytest
from fake_vllm import FakeVllm, manifest, request
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.generators.vllm_cut import CutSpans
from asyncrl.generators.vllm_engine import VllmEngine
from asyncrl.generators.vllm_exact import ExactSpans


async def scene(lengths, updates, seed, in_flight, api):
    engine = VllmEngine(Config.model_validate({"sync": {"in_flight": in_flight}}), "")
    engine._llm = fake = FakeVllm({f"r{i}": length for i, length in enumerate(lengths)}, seed)
    engine._api, engine.version = api, 0
    try:
        sampling = [asyncio.ensure_future(engine.sample(request(i))) for i in range(len(lengths) // 2)]
        for version, ticks in enumerate(updates, start=1):
            for _ in range(ticks):
                await asyncio.sleep(0)
            await engine.load(manifest(version, in_flight))
            if version == 1:
                sampling += [asyncio.ensure_future(engine.sample(request(i))) for i in range(len(lengths) // 2, len(lengths))]
        results = await asyncio.gather(*sampling)
        assert engine.in_flight_tokens() == {}
        return results, fake.truth
    finally:
        for task in fake.tasks:
            task.cancel()


def token_versions(result):
    versions = []
    for span, end in zip(result.version_spans, [*[s.start for s in result.version_spans[1:]], len(result.token_ids)], strict=True):
        versions += [span.version] * (end - span.start)
    return versions


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=6),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(0, 2**20),
    st.sampled_from(["recompute", "restart", "drain"]),
    st.sampled_from([CutSpans(), ExactSpans()]),
)
def test_b29_every_token_is_stamped_with_the_version_that_sampled_it(lengths, updates, seed, in_flight, api):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncrl.generators.vllm_engine.sampling_parameters", lambda request: None)
        results, truth = asyncio.run(asyncio.wait_for(scene(lengths, updates, seed, in_flight, api), 60))
    for i, result in enumerate(results):
        lives = sorted((name for name in truth if name.split("#")[0] == f"r{i}"), key=lambda name: int(name.split("#")[1]))
        sampled_by = [weights for weights, _ in truth[lives[-1]]]
        assert token_versions(result) == sampled_by
        assert len(sampled_by) == lengths[i]
        if in_flight != "recompute":
            assert len(set(sampled_by)) == 1, "a response went on over an update (B36)"
