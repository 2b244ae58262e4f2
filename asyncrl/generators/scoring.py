"""Rewards under a time limit: each score is computed in a thread of its own, and whatever goes wrong removes its sibling.

A reward that hangs keeps its thread (a daemon, so that it cannot hold up the end of the process); nobody waits for it.

Source: fault B16.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from dataclasses import dataclass

from asyncrl.errors import DataError
from asyncrl.tasks import Prompt, Reward, check_reward

__all__ = ["RemovalReason", "Removed", "Scored", "Scorer"]

MAX_CONCURRENT = 16


class RemovalReason(enum.StrEnum):
    """Why a sibling did not become a trajectory."""

    REWARD_RAISED = "reward_raised"
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_UNUSABLE = "reward_unusable"
    NO_LOGPROBS = "no_logprobs"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward and its named parts."""

    reward: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Removed:
    """Why there is none."""

    reason: RemovalReason
    detail: str


class Scorer:
    """Scores responses; ``hung`` counts threads that were given up."""

    def __init__(self, reward: Reward, timeout_s: float) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self.hung = 0

    async def score(self, prompt: Prompt, response: str) -> Scored | Removed:
        """The reward of one response, or why it has none; never raises for what a reward does."""
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._in_thread(prompt, response)
            except TimeoutError:
                self.hung += 1
                return Removed(RemovalReason.REWARD_TIMEOUT, f"reward took longer than task.reward_timeout_s={self._timeout_s:g}")

    async def _in_thread(self, prompt: Prompt, response: str) -> Scored | Removed:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Scored | Removed] = loop.create_future()

        def settle(outcome: Scored | Removed) -> None:
            if not future.done():
                future.set_result(outcome)

        def work() -> None:
            outcome = self._outcome(prompt, response)
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody asks any more
                loop.call_soon_threadsafe(settle, outcome)

        threading.Thread(target=work, name="asyncrl-reward", daemon=True).start()
        return await future

    def _outcome(self, prompt: Prompt, response: str) -> Scored | Removed:
        try:
            result = self._reward.score(prompt, response)
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
                raise DataError(f"a reward scores as (number, parts); met {result!r:.80}")
            return Scored(check_reward(result[0]), {name: check_reward(part) for name, part in result[1].items()})
        except DataError as error:
            return Removed(RemovalReason.REWARD_UNUSABLE, str(error))
        except BaseException as error:  # noqa: BLE001 - a reward is the user's code and may raise anything, SystemExit too
            return Removed(RemovalReason.REWARD_RAISED, f"{type(error).__name__}: {error}")
