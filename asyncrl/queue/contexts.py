"""ZeroMQ contexts of clients, held until they are ended.

A context that is collected ends, and waits for its sockets. In a cycle of garbage Python may collect it before them, and then the whole
process stands still. A client that nobody closed therefore leaves its context behind, and nothing waits.

Source: https://docs.python.org/3/library/gc.html; zmq_ctx_term(3).
"""

from __future__ import annotations

from typing import Any, TypeVar

import zmq

__all__ = ["end_context", "hold_context"]

C = TypeVar("C", bound="zmq.Context[Any]")

_held: dict[int, object] = {}


def hold_context(context: C) -> C:
    """Keeps a new context from the collector; returns it."""
    _held[id(context)] = context
    return context


def end_context(context: zmq.Context[Any]) -> None:
    """Ends a context whose sockets are closed; once is enough."""
    context.term()
    _held.pop(id(context), None)
