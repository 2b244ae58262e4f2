"""Prompts, held-out sets and rewards of a run. Loads without torch, ray, vllm or zmq."""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.errors import ConfigError, UnsupportedError
from asyncrl.tasks.files import file_prompts
from asyncrl.tasks.generated import ListedPrompts, copy_digits, held_out, sums
from asyncrl.tasks.gym import GymPrompts, GymReward
from asyncrl.tasks.order import OrderedSource
from asyncrl.tasks.prompt import BadRow, Prompt, PromptSource, Reward
from asyncrl.tasks.rewards import check_reward, function_reward, registered_reward, reward_name
from asyncrl.tasks.templates import check_template
from asyncrl.tasks.unprompted import NoPrompts

__all__ = ["BadRow", "Prompt", "PromptSource", "Reward", "check_reward", "check_task", "new_eval_set", "new_reward", "new_source"]


def new_source(config: Config) -> OrderedSource | NoPrompts:
    """The training prompts of a run, in order; its ``bad_rows`` lists what was skipped of a file.

    Raises:
        ConfigError: options that do not fit the task.
        DataError: a file without a usable row, or a bad row where ``task.bad_rows`` is ``fail``.

    Example:
        >>> new_source(Config()).size is None
        True
    """
    check_template(config.task.template)
    if config.task.name == "none":
        return NoPrompts(config.task)
    return OrderedSource(_gym(config) if config.task.name == "reasoning_gym" else _listed(config), config.task)


def new_eval_set(config: Config) -> list[Prompt]:
    """``task.eval_size`` prompts that training never sees; answers are never permuted here.

    Raises:
        ConfigError: there are fewer, or options do not fit the task.
        DataError: as for :func:`new_source`.
    """
    _check_prompted(config)
    check_template(config.task.template)
    if config.task.name == "reasoning_gym":
        return _gym(config).evaluation(config.task.eval_size)
    return held_out(_listed(config).evaluation, config.task.eval_size)


def new_reward(config: Config) -> Reward:
    """The reward of a run.

    Raises:
        ConfigError: unknown name, with the valid ones; or a ``module:function`` that cannot be used, with the reason.
    """
    _check_prompted(config)
    name = reward_name(config)
    if ":" in name:
        return function_reward(name)
    return GymReward(config.task) if name == "reasoning_gym" else registered_reward(name)


def check_task(config: Config) -> None:
    """Everything about prompts and reward that can be known before a process starts; reads the file, if there is one.

    A reward of the user is not tried where generators have an interpreter of their own: it need not import here.

    Raises:
        ConfigError, DataError: as for :func:`new_source`, :func:`new_eval_set` and :func:`new_reward`.
    """
    _check_prompted(config)
    new_source(config)
    new_eval_set(config)
    if not (config.generator.python and ":" in config.task.reward):
        new_reward(config)


def _check_prompted(config: Config) -> None:
    if config.task.name == "none":
        raise UnsupportedError(
            "task.name=none has tickets without prompts, for trainers with data of their own (`asyncrl queue serve`); nothing can be "
            "sampled or scored here: choose another task"
        )


def _gym(config: Config) -> GymPrompts:
    return GymPrompts(config.task)


def _listed(config: Config) -> ListedPrompts:
    if config.task.name == "sums":
        return sums(config.task)
    if config.task.name == "copy":
        return copy_digits(config.task)
    if not config.task.path:
        raise ConfigError(f"task.name={config.task.name} reads a file: set task.path")
    return file_prompts(config.task, reward_name(config))
