"""The protocol of a sampling engine and the registry that finds one by name.

An engine is one file that registers a factory at import. Generators know nothing of learners.

Source: design note, sections 2, 5 and 6.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from asyncrl.config import Config
from asyncrl.errors import ConfigError, EngineError
from asyncrl.sync.messages import UpdateManifest
from asyncrl.trajectory import VersionSpan

__all__ = ["GeneratorEngine", "SampleRequest", "SampleResult", "engine_names", "new_engine", "register"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sequence to sample: prompt ids, temperature (0: greedy), stop texts, seed."""

    request_id: str
    prompt_ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    stop: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What the engine returned for one request.

    Attributes:
        request_id: of the request it answers; prompt_ids: as the engine saw them.
        token_ids: int32 [R] sampled ids, byte for byte as returned; logprobs: float32 [R], tempered; NaN where
            the engine returned none.
        version_spans: starts count from the first sampled token.
        text: decoded response; finish_reason: ``stop``, ``length`` or ``abort``.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: np.ndarray
    logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    text: str
    finish_reason: str


class GeneratorEngine(Protocol):
    """A running sampler whose weights can be replaced.

    ``logprobs_mode`` must be ``processed`` (temperature inside the softmax) for training traffic;
    an engine that declares nothing else is refused. ``batch_invariant``: log-probs and samples do not depend
    on what else is batched. ``version`` is the committed one, -1 before the first update. ``max_model_len`` is the longest
    prompt and response together, in tokens, known after :meth:`start`.
    """

    name: str
    logprobs_mode: str
    batch_invariant: bool
    version: int
    max_model_len: int

    async def start(self) -> None:
        """Loads the model; returns when requests can be sampled."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of chat messages under the model's template, ready for the assistant's turn."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Samples one sequence; safe to call many at a time."""

    def in_flight_tokens(self) -> dict[int, int]:
        """Tokens sampled so far by requests that still run, by version; raises EngineError once the engine has died."""

    async def check(self, manifest: UpdateManifest) -> None:
        """Raises SyncError unless names, shapes and dtypes fit the model."""

    async def load(self, manifest: UpdateManifest) -> float:
        """Pauses as ``manifest.in_flight`` says, loads the verified bytes, stamps the version, resumes; seconds paused."""

    async def close(self) -> None:
        """Ends the engine and every process under it."""


_factories: dict[str, Callable[[Config, str], GeneratorEngine]] = {}
_modules = {"vllm": "asyncrl.generators.vllm_engine"}


def register(name: str) -> Callable[[Callable[[Config, str], GeneratorEngine]], Callable[[Config, str], GeneratorEngine]]:
    """Registers a factory ``(config, model folder) -> engine`` under a name."""

    def add(factory: Callable[[Config, str], GeneratorEngine]) -> Callable[[Config, str], GeneratorEngine]:
        _factories[name] = factory
        return factory

    return add


def engine_names() -> list[str]:
    """Names that ``new_engine`` knows."""
    return sorted(_modules)


def new_engine(config: Config, model_dir: str) -> GeneratorEngine:
    """The engine that ``generator.engine`` names.

    Raises:
        ConfigError: unknown name, with the valid ones.
        EngineError: its package does not import, with the true import error.
    """
    name = config.generator.engine
    if name not in _modules:
        raise ConfigError(f"generator.engine is one of {', '.join(engine_names())}; met {name!r}")
    try:
        importlib.import_module(_modules[name])
    except ImportError as error:
        raise EngineError(f"generator engine {name!r} does not import here: {error}; install asyncrl's requirements for it") from error
    return _factories[name](config, model_dir)
