"""What asyncrl leaves out on purpose: refused by name when the options are read, with the reason and the nearest that works.

Names are patterns, since the same wish is spelled differently from program to program. What an engine refuses it lists from here,
so that ``asyncrl engines`` and the error tell the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from asyncrl.errors import UnsupportedError

__all__ = [
    "REFUSED_NAMES",
    "REFUSED_VALUES",
    "ROUTER_REPLAY",
    "TURNS_ON_ONE_GPU",
    "Refusal",
    "check_values",
    "refuse_name",
    "refuse_value",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A combination that is not supported.

    Attributes:
        combination: what was asked for; empty where the option's own name says it.
        reason: why it is refused.
        nearest: what comes closest and works.

    Example:
        >>> Refusal(combination="A and B", reason="no C", nearest="A").text("x.b")
        'x.b is not supported (A and B): no C; nearest that works: A'
    """

    combination: str = ""
    reason: str
    nearest: str

    def text(self, asked: str) -> str:
        """The refusal of ``asked`` in one line."""
        what = f" ({self.combination})" if self.combination else ""
        return f"{asked} is not supported{what}: {self.reason}; nearest that works: {self.nearest}"


_TRUNCATED = Refusal(reason="the engine would renormalise the kept tokens and the learner would not", nearest="generator.temperature")

ROUTER_REPLAY = Refusal(
    combination="router replay",
    reason="trajectories carry no choice of experts, so the learner routes by its own weights",
    nearest="algorithm.proximal=recompute with algorithm.correction=mask, which take out what that changes too much",
)
TURNS_ON_ONE_GPU = Refusal(
    combination="roles that take turns on a GPU",
    reason="generators sample while the learner trains, so neither gives up its memory for the other",
    nearest="a share for each that stays: generator.num_gpus, learner.num_gpus and generator.gpu_memory_utilization",
)

REFUSED_NAMES: Mapping[str, Refusal] = {
    "generator.top_p": _TRUNCATED,
    "generator.top_k": _TRUNCATED,
    "generator.min_p": _TRUNCATED,
    "algorithm.kl_coef": Refusal(
        reason="a run scores no reference policy", nearest="algorithm.clip_high and queue.max_staleness, which bound the step"
    ),
    "critic.*": Refusal(combination="a critic", reason="a run trains the actor alone", nearest="algorithm.advantage=grpo"),
    "*router_replay*": ROUTER_REPLAY,
    "*routing_replay*": ROUTER_REPLAY,
    "*hybrid_engine*": TURNS_ON_ONE_GPU,
    "*colocat*": TURNS_ON_ONE_GPU,
    "*sleep_mode*": TURNS_ON_ONE_GPU,
}
"""By a pattern of dotted names; the first that fits counts. An option that exists is never looked up."""

_NOT_BUILT = Refusal(reason="no engine of this name is built", nearest="learner.engine=fsdp2")
_NO_DEVICE = Refusal(reason="engines are registered for cpu and cuda alone", nearest="learner.device=auto")

REFUSED_VALUES: Mapping[str, Mapping[str, Refusal]] = {
    "learner.engine": {
        **dict.fromkeys(("mindspeed_megatron", "torchtitan", "veomni", "automodel"), _NOT_BUILT),
        "fsdp": Refusal(reason="torch has replaced it by fully_shard", nearest="learner.engine=fsdp2"),
    },
    "learner.device": dict.fromkeys(("npu", "xpu", "mps", "tpu"), _NO_DEVICE),
    "learner.attention": {
        "flash_attention_2": Refusal(
            reason="it takes no mask, by which siblings see their shared prompt and not each other", nearest="learner.attention=sdpa"
        ),
        "flex_attention": Refusal(reason="it has no backward pass on a CPU", nearest="learner.attention=sdpa"),
    },
    "model.dtype": {
        "float16": Refusal(reason="no engine scales the loss, without which gradients underflow", nearest="model.dtype=bfloat16")
    },
}
"""By dotted name of an option that exists, and value."""


def refuse_name(name: str) -> None:
    """Raises UnsupportedError where ``name``, which is no option, is a wish that is refused on purpose."""
    for pattern, refusal in REFUSED_NAMES.items():
        if fnmatchcase(name, pattern):
            raise UnsupportedError(refusal.text(name), option=name)


def refuse_value(option: str, value: Any) -> None:
    """Raises UnsupportedError where this value of an option that exists is refused on purpose."""
    refusal = REFUSED_VALUES.get(option, {}).get(str(value))
    if refusal is not None:
        raise UnsupportedError(refusal.text(f"{option}={value}"), option=option)


def check_values(values: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for a refused value among options as they are nested: group, then option."""
    for option in REFUSED_VALUES:
        group, _, leaf = option.partition(".")
        refuse_value(option, (values.get(group) or {}).get(leaf))
