"""Rewards by registered name or as ``module:function``, and the check of what they return.

A registered reward says which answers it can work with, so that a row without a usable one is refused
when the data is read, with its row number, and not scored as wrong for ever.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.errors import ConfigError, DataError
from asyncrl.tasks.numerals import last_number, whole_number
from asyncrl.tasks.prompt import Prompt, Reward

__all__ = ["MAX_REWARD", "answer_fault", "check_reward", "function_reward", "registered_reward", "reward_name", "reward_names"]

MAX_REWARD = 1e6

_DEFAULTS = {
    "sums": "exact_text",
    "copy": "positions",
    "reasoning_gym": "reasoning_gym",
    "jsonl": "final_number",
    "parquet": "final_number",
}


def check_reward(value: object) -> float:
    """The reward as a float; nothing is coerced that is not a number.

    Raises:
        DataError: None, a bool, a text, a non-finite number, or one beyond ``MAX_REWARD`` in size.

    Source: fault B16.
    """
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise DataError(f"a reward is a number; met {value!r:.80} of type {type(value).__name__}: return a float")
    try:
        result = float(number)
    except OverflowError as error:
        raise DataError(f"a reward is at most {MAX_REWARD:g} in size; met an integer beyond every float: scale it") from error
    if not math.isfinite(result):
        raise DataError(f"a reward is finite; met {result!r}: raise an error for a response that cannot be scored")
    if abs(result) > MAX_REWARD:
        raise DataError(f"a reward is at most {MAX_REWARD:g} in size; met {result:g}: scale it")
    return result


def exact_text(prompt: Prompt, response: str) -> float:
    """1 if the response is the answer, outer white space apart."""
    return float(response.strip() == prompt.answer.strip())


def exact_number(prompt: Prompt, response: str) -> float:
    """1 if the whole response is a number equal to the answer."""
    value = whole_number(response)
    return float(value is not None and value == whole_number(prompt.answer))


def final_number(prompt: Prompt, response: str) -> float:
    """1 if the number after ``####``, or else the last number of the response, equals the answer."""
    value = last_number(response)
    return float(value is not None and value == whole_number(prompt.answer))


def positions(prompt: Prompt, response: str) -> float:
    """Share of positions that hold the answer's character; characters beyond its length count as wrong ones."""
    hits = sum(a == b for a, b in zip(prompt.answer, response, strict=False))
    return hits / max(len(prompt.answer), len(response), 1)


_ScoreFunction = Callable[[Prompt, str], float]
_functions: dict[str, _ScoreFunction] = {
    "exact_number": exact_number,
    "exact_text": exact_text,
    "final_number": final_number,
    "positions": positions,
}
_needs_number = frozenset({"exact_number", "final_number"})


@dataclass(frozen=True, slots=True)
class _FunctionReward:
    """A reward made of one function of prompt and response, which may return its parts too."""

    name: str
    function: Callable[[Prompt, str], Any]

    def score(self, prompt: Prompt, response: str) -> tuple[float, dict[str, float]]:
        """Reward and its named parts, both checked."""
        result = self.function(prompt, response)
        value, parts = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(parts, dict):
            raise DataError(f"reward {self.name} returns a number, or a number and a dict of parts; met {type(parts).__name__}")
        return check_reward(value), {str(name): check_reward(part) for name, part in parts.items()}


def reward_names() -> list[str]:
    """Registered names; ``reasoning_gym`` scores with the dataset's own rule."""
    return sorted([*_functions, "reasoning_gym"])


def reward_name(config: Config) -> str:
    """The reward of a run: the option, or the task's own."""
    return config.task.reward or _DEFAULTS[config.task.name]


def registered_reward(name: str) -> Reward:
    """A reward by its registered name.

    Raises:
        ConfigError: unknown name, with the valid ones.
    """
    if name not in _functions:
        raise ConfigError(f"task.reward is module:function or one of {', '.join(reward_names())}; met {name!r}")
    return _FunctionReward(name, _functions[name])


def function_reward(path: str) -> Reward:
    """A reward from ``module:function``, called as ``function(prompt, response)``.

    Raises:
        ConfigError: the module does not import, has no such function, or the function cannot be called so.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises at import is shown as it is
        raise ConfigError(f"task.reward {path!r}: module {module_name!r} does not import: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        offered = sorted(name for name, member in vars(module).items() if inspect.isfunction(member) and not name.startswith("_"))
        raise ConfigError(f"task.reward {path!r}: {module_name} has no function {attribute!r}; it has {', '.join(offered) or 'none'}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"task.reward {path!r} is a coroutine function; rewards run in threads: make it a plain one")
    try:
        inspect.signature(function).bind("prompt", "response")
    except TypeError as error:
        raise ConfigError(f"task.reward {path!r} is called as function(prompt, response), which it does not accept: {error}") from error
    return _FunctionReward(path, function)


def answer_fault(reward: str, answer: str) -> str:
    """Why this reward cannot work with this answer; empty if it can."""
    if ":" in reward:
        return ""
    if not answer.strip():
        return f"the answer is empty, and reward {reward} compares with it"
    if reward in _needs_number and whole_number(answer) is None:
        return f"the answer {answer[:40]!r} is not a number, which reward {reward} needs; task.reward=exact_text compares text"
    return ""
