"""Prompts and scores out of reasoning-gym, which is imported on first use.

An entry is a pure function of seed + index, so a prompt carries only its index and the reward makes the
entry again. Training and held-out sets are told apart by the question's text: small datasets repeat
questions, and a repeated question always falls on the same side.
"""

from __future__ import annotations

import json
from typing import Any

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks.generated import is_held_out
from asyncrl.tasks.prompt import BadRow, Prompt
from asyncrl.tasks.rewards import check_reward
from asyncrl.tasks.templates import fill

__all__ = ["GymPrompts", "GymReward"]

_COUNT = 1_000_000
_MAX_TRIES = 200


class GymPrompts:
    """A million entries of one dataset, those of the held-out side replaced by later ones.

    Raises:
        ConfigError: the package is missing, the name or its arguments are not valid, or there are too few distinct questions.
    """

    def __init__(self, task: TaskConfig) -> None:
        self._task = task
        self._dataset = _new_dataset(task)
        self.count = task.size or _COUNT
        self.bad_rows: tuple[BadRow, ...] = ()

    def row(self, number: int) -> Prompt:
        """Training prompt ``number``: the first of entries number, number + count, … whose question is for training."""
        for turn in range(_MAX_TRIES):
            index = number + turn * self.count
            entry = self._dataset[index]
            if not is_held_out(entry["question"], self._task.seed):
                return self._prompt(index, entry)
        raise ConfigError(
            f"reasoning_gym {self._task.dataset}: {_MAX_TRIES} entries in a row are held-out questions; widen task.dataset_args"
        )

    def evaluation(self, wanted: int) -> list[Prompt]:
        """The first ``wanted`` distinct held-out questions."""
        found: dict[str, Prompt] = {}
        for index in range(wanted * _MAX_TRIES):
            if len(found) == wanted:
                break
            entry = self._dataset[index]
            question = entry["question"]
            if question not in found and is_held_out(question, self._task.seed):
                found[question] = self._prompt(index, entry)
        if len(found) < wanted:
            raise ConfigError(
                f"task.eval_size is at most the distinct held-out questions; met {wanted}, {self._task.dataset} gave {len(found)}: "
                "lower it or widen task.dataset_args"
            )
        return list(found.values())

    def _prompt(self, index: int, entry: dict[str, Any]) -> Prompt:
        return Prompt(
            prompt_id=f"{self._task.dataset}/{index}",
            prompt=fill(self._task.template, entry["question"]),
            answer=str(entry["answer"]),
            extra=json.dumps({"index": index}),
        )


class GymReward:
    """The dataset's own score, partial scores included, on the response without outer white space."""

    def __init__(self, task: TaskConfig) -> None:
        if task.name != "reasoning_gym":
            raise ConfigError(f"task.reward=reasoning_gym scores task.name=reasoning_gym; met task.name={task.name}")
        self.name = "reasoning_gym"
        self._dataset = _new_dataset(task)

    def score(self, prompt: Prompt, response: str) -> tuple[float, dict[str, float]]:
        """Score in [0, 1]; no parts."""
        entry = self._dataset[json.loads(prompt.extra)["index"]]
        return check_reward(self._dataset.score_answer(response.strip(), entry)), {}


def _new_dataset(task: TaskConfig) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"task.name=reasoning_gym needs the package reasoning-gym: {error}; pip install 'asyncrl[tasks]'") from error
    if task.dataset not in DATASETS:
        near = [name for name in sorted(DATASETS) if task.dataset[:4] in name] or sorted(DATASETS)
        raise ConfigError(f"task.dataset is a dataset of reasoning-gym; met {task.dataset!r}; there are {', '.join(near[:12])}")
    own = {"seed", "size"} & set(task.dataset_args)
    if own:
        raise ConfigError(f"task.dataset_args hold neither seed nor size; met {', '.join(sorted(own))}: use task.seed and task.size")
    try:
        return reasoning_gym.create_dataset(task.dataset, size=_COUNT * _MAX_TRIES, seed=task.seed, **task.dataset_args)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.dataset_args do not fit {task.dataset}: {error}") from error
