"""The receiver's DEALER with every limit set, and the monitor that tells when its publisher comes and goes."""

from __future__ import annotations

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

__all__ = ["connected_dealer", "next_connected"]

HIGH_WATER_MARK = 64
MAX_MESSAGE_BYTES = 64 << 20
LINGER_MS = 500


def connected_dealer(context: zmq.asyncio.Context, endpoint: str, name: str) -> zmq.asyncio.Socket:
    """A DEALER known to the publisher as ``name``; reconnects by itself."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, name.encode())
    dealer.setsockopt(zmq.LINGER, LINGER_MS)
    dealer.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    dealer.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    dealer.connect(endpoint)
    return dealer


async def next_connected(monitor: zmq.asyncio.Socket) -> bool:
    """Waits for the next event of a monitor: True when a connection was made, False when one was lost."""
    event = parse_monitor_message(await monitor.recv_multipart())["event"]
    return bool(event != zmq.EVENT_DISCONNECTED)
