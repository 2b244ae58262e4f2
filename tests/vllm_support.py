"""What the tests of the real vLLM engine share: tiny versions of one model, snapshots of them, and the Hugging Face reference."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import torch
from export_support import run_with_checkpoint, trained_engine
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.config.run_dir import RunDir, RunFacts
from asyncrl.generators.engine import SampleRequest
from asyncrl.generators.vllm_engine import VllmEngine
from asyncrl.launch.model_builders import build_tiny
from asyncrl.learner.export import export_checkpoint
from asyncrl.sync.checksums import verify_checksums
from asyncrl.sync.snapshots import new_manifest
from asyncrl.sync.transports import new_transport

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Rig:
    """A real engine, and the models of every version it has been given.

    Before the first update, as version -1, and as version 0 they are the model folder itself: the export of a model that was trained for
    two steps; ``base_dir`` is the one before them.
    """

    def __init__(self, folder, *, tied=False, learner=None, **options):
        generator = {"temperature": 1.0, "max_num_seqs": 32, "kv_cache_mib": 64, **options.pop("generator", {})}
        self.config = Config.model_validate({"generator": generator, "model": {"tied": tied}, **options})
        self.tied = tied
        self.base_dir = folder / "base"
        build_tiny(self.base_dir, dtype="float32", tied=tied, seed=0)
        run_dir = run_with_checkpoint(folder, trained_engine(str(self.base_dir), **(learner or {})))
        self.model_dir = export_checkpoint(run_dir, run_dir.export)
        self.facts = RunFacts(
            run_id=f"rig{time.time_ns()}",
            incarnation=0,
            queue_endpoints=(),
            sync_endpoint="",
            rendezvous="",
            model_dir=str(self.model_dir),
            generator_device="cpu",
            learner_device="cpu",
        )
        self.transport = new_transport("shm", self.facts, RunDir(folder))
        self.models = dict.fromkeys((-1, 0), AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32))
        self.loop = asyncio.new_event_loop()
        self.engine = VllmEngine(self.config, str(self.model_dir))
        self.loop.run_until_complete(self.engine.start())
        self.updates = 0

    def close(self):
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()
        self.transport.close()

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 120))

    def model(self, version):
        """The version's model: far enough from its neighbours that a wrong version shows in the first digit."""
        if version not in self.models:
            generator = torch.Generator().manual_seed(version)
            model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
            self.models[version] = model
        return self.models[version]

    def set_in_flight(self, mode):
        """What the next updates do with running requests."""
        sync = self.config.sync.model_copy(update={"in_flight": mode})
        self.config = self.engine._config = self.config.model_copy(update={"sync": sync})

    async def update(self, version):
        """Publishes a version to the engine the way a receiver does; returns the seconds paused."""
        self.updates += 1
        ties = {HEAD: EMBEDDING} if self.tied else {}
        tensors = [(name, tensor) for name, tensor in self.model(version).state_dict().items() if name not in ties]
        snapshot = self.transport.write(self.updates, tensors)
        manifest = new_manifest(self.config, self.facts, snapshot, update_id=self.updates, version=version, ties=ties)
        await self.engine.check(manifest)
        verify_checksums(manifest)
        paused_s = await self.engine.load(manifest)
        self.transport.release(snapshot.location)
        return paused_s

    def requests(self, number, *, max_new_tokens=400, temperature=1.0, tag="r"):
        return [
            SampleRequest(
                request_id=f"{tag}-{time.time_ns()}-{i}",
                prompt_ids=tuple(self.engine.encode(f"{i % 10}{i // 10}>")),
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                stop=(),
                seed=1000 + i,
            )
            for i in range(number)
        ]

    async def sampled(self, number_of_tokens, started):
        """Waits until running requests have sampled so many tokens since ``started``."""
        while sum(self.engine.in_flight_tokens().values()) < number_of_tokens:
            assert not all(task.done() for task in started), "every request ended before the update: sample longer"
            await asyncio.sleep(0.002)

    def reference(self, result, version, temperature=1.0):
        """float32 [R]: log-probs of the response under one version by a plain Hugging Face forward."""
        ids = [*result.prompt_ids, *result.token_ids.tolist()]
        with torch.no_grad():
            logits = self.model(version)(torch.tensor([ids])).logits[0, len(result.prompt_ids) - 1 : -1].float()
        chosen = torch.tensor(result.token_ids.tolist())[:, None]
        return (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0].numpy()

    def worst_error(self, result, temperature=1.0):
        """Largest difference of any token's log-prob from the reference of the version that is stamped on it."""
        worst, ends = 0.0, [span.start for span in result.version_spans[1:]] + [len(result.token_ids)]
        for span, end in zip(result.version_spans, ends, strict=True):
            expected = self.reference(result, span.version, temperature)[span.start : end]
            worst = max(worst, float(np.abs(result.logprobs[span.start : end] - expected).max()))
        return worst
