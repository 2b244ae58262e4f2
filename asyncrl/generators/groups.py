"""From a ticket to a group: prompt ids, siblings, rewards, trajectories.

A sibling that fails is removed with a reason and the rest of the group goes on; a group that is left with nothing to compare
is given back. Token ids are those that the engine was given and returned; nothing is decoded and encoded again.

Source: design note, section 3; faults B06, B07, B16, B29.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.errors import DataError, SchemaError
from asyncrl.generators.engine import GeneratorEngine, SampleRequest, SampleResult
from asyncrl.generators.scoring import RemovalReason, Removed, Scored, Scorer
from asyncrl.queue.messages import Ticket
from asyncrl.tasks import Prompt
from asyncrl.trajectory import Trajectory, TrajectoryGroup, VersionSpan

__all__ = ["GroupSampler", "UnusablePromptError", "new_trajectory", "prompt_ids", "prompt_of", "sibling_seed"]

log = logging.getLogger(__name__)


class UnusablePromptError(DataError):
    """A prompt that no attempt can sample."""


def sibling_seed(seed: int, sibling: int) -> int:
    """Seed of one sibling, a pure function of the ticket's; in [0, 2**63).

    Example:
        >>> sibling_seed(7, 0) != sibling_seed(7, 1) != sibling_seed(8, 1)
        True
    """
    digest = hashlib.blake2b(f"{seed}/{sibling}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_of(ticket: Ticket) -> Prompt:
    """What the ticket says of its prompt, for the reward."""
    return Prompt(prompt_id=ticket.prompt_id, prompt=ticket.prompt, is_chat=ticket.is_chat, answer=ticket.answer, extra=ticket.extra)


def prompt_ids(engine: GeneratorEngine, prompt: Prompt, max_new_tokens: int) -> tuple[int, ...]:
    """Token ids of a prompt.

    Raises:
        UnusablePromptError: it cannot be encoded, is empty, or leaves no room for the response.
    """
    try:
        ids = engine.encode_chat(json.loads(prompt.prompt)) if prompt.is_chat else engine.encode(prompt.prompt)
    except (DataError, UnicodeError, ValueError) as error:
        raise UnusablePromptError(f"prompt {prompt.prompt_id} cannot be encoded: {error}", prompt_id=prompt.prompt_id) from error
    if not ids:
        raise UnusablePromptError(f"a prompt has at least one token; {prompt.prompt_id} has none", prompt_id=prompt.prompt_id)
    if len(ids) + max_new_tokens > engine.max_model_len:
        raise UnusablePromptError(
            f"prompt and response fit into {engine.max_model_len} tokens; {prompt.prompt_id} has {len(ids)} and "
            f"generator.max_new_tokens={max_new_tokens}: shorten it or raise generator.max_model_len",
            prompt_id=prompt.prompt_id,
        )
    return tuple(ids)


class GroupSampler:
    """Samples and scores the siblings of tickets.

    Args:
        sequential: one request at a time in order of sibling, where what is batched beside a request would change it.
    """

    def __init__(self, config: Config, engine: GeneratorEngine, scorer: Scorer, name: str, incarnation: int, *, sequential: bool) -> None:
        self._config = config
        self._engine = engine
        self._scorer = scorer
        self._name = name
        self._incarnation = incarnation
        self._sequential = sequential
        self.removed: Counter[RemovalReason] = Counter()
        self.sampled_tokens = 0

    async def sample(self, ticket: Ticket) -> TrajectoryGroup:
        """The group of one ticket, siblings in order.

        Raises:
            UnusablePromptError: no attempt at this prompt can succeed.
            DataError: too few siblings were left, with the reasons of the others.
            EngineError: the engine died.
        """
        self._check_version(ticket)
        prompt = prompt_of(ticket)
        ids = prompt_ids(self._engine, prompt, self._config.generator.max_new_tokens)
        size = self._config.algorithm.group_size
        siblings = [self._starter(ticket, prompt, ids, sibling) for sibling in range(size)]
        outcomes = await _one_by_one(siblings) if self._sequential else await _all_at_once(siblings)
        trajectories = tuple(outcome for outcome in outcomes if isinstance(outcome, Trajectory))
        removed = [outcome for outcome in outcomes if isinstance(outcome, Removed)]
        for outcome in removed:
            self.removed[outcome.reason] += 1
            log.warning("a sibling of %s (prompt %s) is removed: %s: %s", ticket.group_id, ticket.prompt_id, outcome.reason, outcome.detail)
        if len(trajectories) < min(2, size):
            reasons = "; ".join(sorted({f"{outcome.reason}: {outcome.detail}" for outcome in removed}))
            raise DataError(f"{len(trajectories)} of {size} siblings are left: {reasons}", group_id=ticket.group_id)
        return TrajectoryGroup(trajectories=trajectories)

    def _check_version(self, ticket: Ticket) -> None:
        version = self._engine.version
        if version < ticket.not_before_version or ticket.exact_version not in (-1, version):
            wanted = f"exactly {ticket.exact_version}" if ticket.exact_version >= 0 else f"at least {ticket.not_before_version}"
            raise DataError(
                f"ticket {ticket.ticket} is sampled by version {wanted}; this generator serves {version}", group_id=ticket.group_id
            )

    def _starter(self, ticket: Ticket, prompt: Prompt, ids: tuple[int, ...], sibling: int) -> Callable[[], Awaitable[Trajectory | Removed]]:
        return lambda: self._sibling(ticket, prompt, ids, sibling)

    async def _sibling(self, ticket: Ticket, prompt: Prompt, ids: tuple[int, ...], sibling: int) -> Trajectory | Removed:
        generator = self._config.generator
        request = SampleRequest(
            request_id=f"{ticket.group_id}.{ticket.attempt}.{sibling}",
            prompt_ids=ids,
            temperature=generator.temperature,
            max_new_tokens=generator.max_new_tokens,
            stop=tuple(generator.stop),
            seed=sibling_seed(ticket.seed, sibling),
        )
        dispatched_s = time.time()
        result = await self._engine.sample(request)
        self.sampled_tokens += len(result.token_ids)
        scored = await self._scorer.score(prompt, result.text)
        if isinstance(scored, Removed):
            return scored
        identity = {
            "group_id": ticket.group_id, "ticket": ticket.ticket, "attempt": ticket.attempt, "sibling": sibling, "sample": 0,
            "prompt_id": ticket.prompt_id, "seed": request.seed, "incarnation": self._incarnation, "temperature": generator.temperature,
            "generator": self._name, "engine": self._engine.name, "dispatched_s": dispatched_s, "finished_s": time.time(),
        }  # fmt: skip
        return new_trajectory(result, scored, identity)


def new_trajectory(result: SampleResult, scored: Scored, identity: dict[str, Any]) -> Trajectory | Removed:
    """A trajectory of one response; only tokens with a log-prob of the engine are trained (fault B06).

    Args:
        identity: the fields of :class:`Trajectory` that say whose it is.
    """
    before = len(result.prompt_ids)
    known = np.isfinite(result.logprobs)
    if not known.any():
        return Removed(RemovalReason.NO_LOGPROBS, f"none of {len(known)} sampled tokens has a log-prob")
    try:
        return Trajectory.checked(
            input_ids=np.concatenate([np.asarray(result.prompt_ids, dtype=np.int32), result.token_ids]),
            loss_mask=np.concatenate([np.zeros(before, dtype=bool), known]),
            behavior_logprobs=np.concatenate([np.zeros(before, dtype=np.float32), np.where(known, result.logprobs, np.float32(0.0))]),
            version_spans=[VersionSpan(before + span.start, span.version) for span in result.version_spans],
            reward=scored.reward,
            reward_parts=scored.parts,
            finish_reason=result.finish_reason,
            **identity,
        )
    except SchemaError as error:
        return Removed(RemovalReason.INVALID, str(error))


async def _one_by_one(starters: Sequence[Callable[[], Awaitable[Trajectory | Removed]]]) -> list[Trajectory | Removed]:
    return [await start() for start in starters]


async def _all_at_once(starters: Sequence[Callable[[], Awaitable[Trajectory | Removed]]]) -> list[Trajectory | Removed]:
    tasks = [asyncio.ensure_future(start()) for start in starters]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
