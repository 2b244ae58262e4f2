"""The rule that nobody listens to a network without keys.

Source: design note, section 4.
"""

from __future__ import annotations

import ipaddress

from asyncrl.config.schema import QueueConfig
from asyncrl.errors import ConfigError

__all__ = ["check_exposure", "check_network", "is_local"]


def check_exposure(endpoint: str, keys: str) -> None:
    """Whether a socket may be bound at ``endpoint`` when ``keys`` is its folder of keys (empty: it has none).

    Raises:
        ConfigError: the endpoint can be reached from another machine and there are no keys.

    Example:
        >>> check_exposure("tcp://127.0.0.1:5555", "")
    """
    if keys or is_local(endpoint):
        return
    raise ConfigError(
        f"a socket that other machines can reach lets in known keys alone; met {endpoint} and no queue.keys: make keys with "
        "`asyncrl keys DIR NAME…` and set queue.keys=DIR, or listen at 127.0.0.1"
    )


def check_network(queue: QueueConfig) -> None:
    """Whether a queue with these options may listen where it is to, and can be reached there.

    Raises:
        ConfigError: other machines would reach it without keys, its clients would be told no address, or payload could not travel.
    """
    if queue.payload == "direct" and queue.durability != "memory":
        raise ConfigError(
            "queue.payload=direct leaves payload with its producer, and a log keeps it at the broker; met "
            f"queue.durability={queue.durability}: set queue.durability=memory, or queue.payload=inline"
        )
    if queue.transport == "ipc":
        return
    if queue.host in ("*", "0.0.0.0", "::", "[::]"):
        raise ConfigError(f"queue.host is the address that clients connect to; met {queue.host}: name one address of this machine")
    endpoint = f"tcp://{queue.host}:{queue.port}"
    check_exposure(endpoint, queue.keys)
    if queue.payload == "shm" and not is_local(endpoint):
        raise ConfigError(f"shared memory does not reach other machines; met queue.host={queue.host}: set queue.payload=inline, or direct")


def is_local(endpoint: str) -> bool:
    """Whether only processes of this machine can reach an endpoint."""
    scheme, _, address = endpoint.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or host == "localhost":
        return scheme == "tcp"
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface or *: not known to stay on this machine
        return False
