"""Types of numbers that come over a socket: bounded when they are decoded, so that no sum, row or reply of them overflows.

They bind decoders alone; a number made in this process is a plain int or float. Loads with msgspec alone.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = [
    "MAX_COUNT",
    "MAX_TOTAL_TOKENS",
    "Address",
    "Checksum",
    "Count",
    "Priority",
    "Seconds",
    "TokensByVersion",
    "TotalTokens",
]

MAX_COUNT = 1 << 53
MAX_TOTAL_TOKENS = 1 << 48
MAX_VERSIONS = 4096
MAX_ADDRESS = 256

Count = Annotated[int, msgspec.Meta(ge=-1, le=MAX_COUNT)]
"""A number of things, a step, a version, a ticket; -1 for none."""

TotalTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOTAL_TOKENS)]
"""Tokens of one producer's life: those of 4,096 producers still sum within 64 bits."""

TokensByVersion = Annotated[dict[Count, TotalTokens], msgspec.Meta(max_length=MAX_VERSIONS)]
"""Tokens by the version that sampled them."""

Checksum = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits; msgpack itself has none larger."""

Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""A finite time."""

Priority = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
"""What the orders that draw by priority take."""

Address = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS)]
"""A ZeroMQ endpoint; empty for none."""
