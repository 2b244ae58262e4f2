"""The vLLM adapter: an AsyncLLM whose weights are replaced under pause, with exact versions on every token.

An update runs ``pause → load in the worker → stamp → resume``; which tokens belong to which version follows from the pause
alone, so requests may start and finish at any time around it. Requests in flight go on in a new segment (recompute: their
cache is dropped and rebuilt by the new weights), start again from the pristine prompt (restart), or finish first (drain).

Source: design note, sections 2 and 6; engine notes, vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.errors import DataError, EngineError, SyncError, UnsupportedError
from asyncrl.generators.engine import SampleRequest, SampleResult, register
from asyncrl.generators.model_shape import ModelShape
from asyncrl.generators.spans import Cuts
from asyncrl.generators.vllm_api import SpanApi, acknowledged_tokens, span_api, wait_until_processed
from asyncrl.generators.vllm_start import choose_start_method, engine_arguments, prepare_environment, sampling_parameters
from asyncrl.sync.messages import UpdateManifest

__all__ = ["VllmEngine"]

log = logging.getLogger(__name__)
LOWEST_TEMPERATURE = 0.01


class VllmEngine:
    """One vLLM replica; see :class:`asyncrl.generators.engine.GeneratorEngine`.

    Raises:
        UnsupportedError: a temperature that vLLM would silently raise.
    """

    name = "vllm"
    logprobs_mode = "processed"
    batch_invariant = False

    def __init__(self, config: Config, model_dir: str) -> None:
        if config.generator.temperature < LOWEST_TEMPERATURE:
            raise UnsupportedError(
                f"vLLM samples at {LOWEST_TEMPERATURE} or hotter; met generator.temperature={config.generator.temperature}: raise it"
            )
        self._config = config
        self._model_dir = model_dir
        self._running: dict[str, Cuts] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loading = asyncio.Lock()
        self._llm: Any = None
        self._tokenizer: Any = None
        self._shape: ModelShape | None = None
        self._api: SpanApi | None = None
        self.version = -1
        self.max_model_len = 0

    async def start(self) -> None:
        """Loads the model and the tokenizer; tens of seconds, in which the event loop stands still, and handles no signal yet."""
        start_method = prepare_environment(self._config)
        from transformers import AutoTokenizer
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        started_s = time.monotonic()
        log.info("starting vLLM on %s", self._model_dir)
        self._api = span_api(AsyncLLM)
        self._tokenizer = AutoTokenizer.from_pretrained(self._model_dir)
        self._shape = ModelShape.of_folder(self._model_dir, self._config.model.dtype)
        settings = engine_arguments(self._config, self._model_dir).create_engine_config(UsageContext.ENGINE_CONTEXT)
        choose_start_method(self._config, start_method)
        self._llm = AsyncLLM.from_vllm_config(settings, disable_log_stats=True)
        await self._api.stamp(self._llm, self.version)
        self.max_model_len = int(self._llm.model_config.max_model_len)
        log.info("vLLM is up after %.1f s; versions by %s spans", time.monotonic() - started_s, self._api.name)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of chat messages, ready for the assistant's turn.

        Raises:
            DataError: the model has no chat template, or it refuses these messages.
        """
        try:
            return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            raise DataError(f"the model's chat template does not take this prompt: {error}") from error

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Samples one sequence; a request that an update restarts begins again from the pristine prompt.

        Raises:
            EngineError: the engine died, refused the request, or answered another one.
        """
        parameters, life = sampling_parameters(request), 0
        while True:
            await self._open.wait()
            request_id = f"{request.request_id}#{life}"
            cuts = self._running[request_id] = Cuts(self.version)
            self._idle.clear()
            try:
                output = await self._generate(request, request_id, parameters)
            finally:
                del self._running[request_id]
                if not self._running:
                    self._idle.set()
            if output.outputs[0].finish_reason in ("stop", "length"):
                return self._result(request, output, cuts)
            if self._config.sync.in_flight != "restart":
                raise EngineError(f"vLLM ends a response by stop or length; {request_id} ended by {output.outputs[0].finish_reason}")
            life += 1

    async def _generate(self, request: SampleRequest, request_id: str, parameters: Any) -> Any:
        final = None
        try:
            async for output in self._llm.generate({"prompt_token_ids": list(request.prompt_ids)}, parameters, request_id):
                final = output
        except Exception as error:  # vLLM has one class per way to fail; all of them end the request
            raise EngineError(f"vLLM failed on {request_id}: {type(error).__name__}: {error}", request_id=request_id) from error
        if final is None or not final.finished or final.request_id != request_id or tuple(final.prompt_token_ids) != request.prompt_ids:
            raise EngineError(f"vLLM answers the request that it was asked; {request_id} got {final}", request_id=request_id)
        return final

    def _result(self, request: SampleRequest, output: Any, cuts: Cuts) -> SampleResult:
        assert self._api is not None, "sample() comes after start()"
        completion = output.outputs[0]
        token_ids = np.asarray(completion.token_ids, dtype=np.int32)
        return SampleResult(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            token_ids=token_ids,
            logprobs=_logprobs(completion),
            version_spans=self._api.spans(completion, cuts),
            text=completion.text,
            finish_reason=completion.finish_reason,
        )

    def in_flight_tokens(self) -> dict[int, int]:
        """Tokens sampled so far by running requests, by version.

        Raises:
            EngineError: the engine has died.
        """
        if self._llm.errored:
            raise EngineError("vLLM's engine process has died; its traceback is above in this log")
        counts, by_version = acknowledged_tokens(self._llm), dict[int, int]()
        for request_id, cuts in self._running.items():
            for version, number in cuts.tokens_by_version(counts.get(request_id, 0)).items():
                by_version[version] = by_version.get(version, 0) + number
        return by_version

    async def check(self, manifest: UpdateManifest) -> None:
        """Raises SyncError unless names, shapes, dtypes and ties are those of the model folder."""
        assert self._shape is not None, "check() comes after start()"
        self._shape.check(manifest)

    async def load(self, manifest: UpdateManifest) -> float:
        """Replaces the weights by verified bytes; returns the seconds in which no token was sampled.

        Raises:
            SyncError: with ``drain``, requests in flight did not finish before the commit deadline; the engine goes on unchanged.
            EngineError: the load failed half-way, or the engine died: it cannot be used any more.
        """
        async with self._loading:
            if manifest.in_flight != "drain":
                return await self._load_paused(manifest)
            self._open.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), self._config.sync.commit_timeout_s)
                return await self._load_paused(manifest)
            except TimeoutError as error:
                raise SyncError(
                    f"{len(self._running)} requests did not drain within sync.commit_timeout_s={self._config.sync.commit_timeout_s:.0f}"
                ) from error
            finally:
                self._open.set()

    async def _load_paused(self, manifest: UpdateManifest) -> float:
        assert self._api is not None, "load() comes after start()"
        started_s = time.monotonic()
        try:
            # the cache goes in every mode: no prefix of an older version outlives the update
            await self._llm.pause_generation(mode="abort" if manifest.in_flight == "restart" else "keep", clear_cache=True)
            counts = await wait_until_processed(self._llm, self._running.keys())
            await self._llm.collective_rpc("asyncrl_load_update", args=(msgspec.msgpack.encode(manifest),))
            await self._api.stamp(self._llm, manifest.version)
            for request_id, cuts in self._running.items():
                cuts.stamp(num_tokens=counts.get(request_id, 0), version=manifest.version)
            self.version = manifest.version
            await self._llm.resume_generation()
        except EngineError:
            raise
        except Exception as error:  # an engine with half of an update in it serves nobody, whatever the reason
            raise EngineError(
                f"version {manifest.version} could not be loaded: {type(error).__name__}: {error}; the replica starts again",
                policy_version=manifest.version,
            ) from error
        return time.monotonic() - started_s

    async def close(self) -> None:
        """Ends the engine and its processes."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)


def _logprobs(completion: Any) -> np.ndarray:
    """float32 [R]; NaN where the engine returned no log-prob for a token."""
    reported = completion.logprobs or []
    values = [
        entry[token].logprob if entry and token in entry else np.nan for token, entry in zip(completion.token_ids, reported, strict=False)
    ]
    values += [np.nan] * (len(completion.token_ids) - len(values))
    return np.asarray(values, dtype=np.float32)


register("vllm")(VllmEngine)
