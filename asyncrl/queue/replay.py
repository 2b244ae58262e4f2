"""What ``queue.order`` asks for: the selection that draws batches.

Source: design note, section 4.
"""

from __future__ import annotations

from asyncrl.queue.selection import Selection, make_selection
from asyncrl.queue.settings import GateSettings

__all__ = ["new_selection"]


def new_selection(settings: GateSettings) -> Selection | None:
    """The selection of the order; None for ``fifo``, which the window alone decides."""
    if settings.order == "fifo":
        return None
    return make_selection(settings.order, seed=settings.seed, exponent=settings.priority_exponent)
