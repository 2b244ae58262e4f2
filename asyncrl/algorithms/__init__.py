"""Pure algorithms: arrays in, arrays out. This package loads without torch; ``losses`` and ``divergence`` need it."""

from asyncrl.algorithms.advantages import Advantages, group_advantages

__all__ = ["Advantages", "group_advantages"]
