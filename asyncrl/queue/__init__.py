"""The durable queue: a broker with leases and a bound on staleness, for trainers of asyncrl and of your own.

    asyncrl queue serve DIR                     a queue by itself
    Producer.join, Consumer.join, Observer.join   its clients, given DIR

Names load when they are first used, so that options can be read without zmq. See docs/queue.md and examples/own_trainer.py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.queue.client import Consumer, Observer, Producer
    from asyncrl.queue.ledger import EMPTY
    from asyncrl.queue.messages import Committed, DropReason, Frontier, Lease, QueueStatus, Ticket, Tickets
    from asyncrl.trajectory import GroupMeta, Trajectory, TrajectoryGroup, VersionSpan

__all__ = [
    "EMPTY",
    "Committed",
    "Consumer",
    "DropReason",
    "Frontier",
    "GroupMeta",
    "Lease",
    "Observer",
    "Producer",
    "QueueStatus",
    "Ticket",
    "Tickets",
    "Trajectory",
    "TrajectoryGroup",
    "VersionSpan",
]

_HOMES = {
    "client": ("Consumer", "Observer", "Producer"),
    "ledger": ("EMPTY",),
    "messages": ("Committed", "DropReason", "Frontier", "Lease", "QueueStatus", "Ticket", "Tickets"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((f"asyncrl.queue.{module}" for module, names in _HOMES.items() if name in names), "asyncrl.trajectory")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
