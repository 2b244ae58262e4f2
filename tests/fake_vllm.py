"""A fake of vLLM's AsyncLLM that knows which weights sampled each token."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import msgspec

from asyncrl.generators.engine import SampleRequest
from asyncrl.sync.messages import UpdateManifest


class FakeVllm:
    """Samples in one task and counts in another, with a queue between them, as vLLM does; ``truth`` is what sampled each token."""

    errored = False

    def __init__(self, lengths, seed):
        self.random, self.lengths, self.truth = random.Random(seed), lengths, {}
        self.weights, self.label, self.paused, self.sampling = 0, "0", False, {}
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.output_processor = SimpleNamespace(request_states={})
        self.tasks = [asyncio.ensure_future(self.step()), asyncio.ensure_future(self.count())]

    async def ticks(self, most=3):
        for _ in range(self.random.randint(0, most)):
            await asyncio.sleep(0)

    async def step(self):
        while True:
            for request_id, wanted in list(self.sampling.items()):
                if self.paused:
                    break
                self.truth.setdefault(request_id, []).append((self.weights, self.label))
                done = len(self.truth[request_id]) == wanted
                if done:
                    del self.sampling[request_id]
                self.engine_core.outputs_queue.put_nowait((request_id, "length" if done else None))
            await asyncio.sleep(0)

    async def count(self):
        while True:
            request_id, reason = await self.engine_core.outputs_queue.get()
            state = self.output_processor.request_states.get(request_id)
            await self.ticks()
            if state is None:
                continue
            state.tokens += reason != "abort"
            if reason:
                del self.output_processor.request_states[request_id]
                state.done.set_result(reason)

    async def generate(self, prompt, parameters, request_id):
        await self.ticks()
        state = SimpleNamespace(external_req_id=request_id, tokens=0, done=asyncio.get_running_loop().create_future())
        state.detokenizer = SimpleNamespace(num_output_tokens=lambda: state.tokens)
        self.output_processor.request_states[request_id] = state
        await self.ticks()
        self.sampling[request_id] = self.lengths[request_id.split("#")[0]]
        reason = await state.done
        await self.ticks(10)
        truth = self.truth.get(request_id, [])
        spans = [SimpleNamespace(version=label, start=i, end=i + 1) for i, (_, label) in enumerate(truth)]
        ids = list(range(len(truth)))
        yield SimpleNamespace(
            request_id=request_id,
            finished=True,
            prompt_token_ids=prompt["prompt_token_ids"],
            outputs=[
                SimpleNamespace(
                    token_ids=ids,
                    logprobs=[{i: SimpleNamespace(logprob=-0.5)} for i in ids],
                    weight_versions=spans,
                    text="",
                    finish_reason=reason,
                )
            ],
        )

    async def pause_generation(self, mode, clear_cache):
        assert clear_cache
        await self.ticks()
        self.paused = True
        if mode == "abort":
            for request_id in list(self.sampling):
                del self.sampling[request_id]
                self.engine_core.outputs_queue.put_nowait((request_id, "abort"))
        await self.ticks()

    async def collective_rpc(self, method, args):
        assert self.paused, "weights are replaced under pause only"
        await self.ticks(6)
        self.weights = msgspec.msgpack.decode(args[0], type=UpdateManifest).version

    async def update_weight_version(self, label):
        self.label = label

    async def resume_generation(self):
        await self.ticks()
        self.paused = False


def manifest(version, in_flight):
    return UpdateManifest(
        update_id=version, incarnation=0, version=version, transport="file", location="", total_bytes=0, tensors=(), ties={},
        in_flight=in_flight, hold=False,
    )  # fmt: skip


def request(i):
    return SampleRequest(request_id=f"r{i}", prompt_ids=(1, 2), temperature=1.0, max_new_tokens=8, stop=(), seed=i)
