"""What ``queue.order`` asks for: the selection that draws batches, and the limiter that ties draws to inserts.

Source: design note, section 4.
"""

from __future__ import annotations

from asyncrl.queue.limiter import Limiter
from asyncrl.queue.selection import Selection, make_selection
from asyncrl.queue.settings import GateSettings

__all__ = ["new_limiter", "new_selection"]


def new_selection(settings: GateSettings) -> Selection | None:
    """The selection of the order; None for ``fifo``, which the window alone decides."""
    if settings.order == "fifo":
        return None
    return make_selection(settings.order, seed=settings.seed, exponent=settings.priority_exponent)


def new_limiter(settings: GateSettings) -> Limiter | None:
    """The limiter of an order other than ``fifo``; a buffer of 0 stands for the smallest that can live.

    Raises:
        ConfigError: the settings would deadlock, with the numbers.
    """
    if settings.order == "fifo":
        return None
    rate, groups = settings.samples_per_insert or float(settings.max_uses), settings.groups_per_step
    return Limiter(
        rate,
        groups,
        settings.error_buffer or (rate + groups) / 2,
        groups_per_step=groups,
        max_uses=settings.max_uses,
        capacity_groups=settings.max_queued_groups,
    )
