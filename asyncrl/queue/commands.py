"""The sub-commands of ``asyncrl`` that belong to the queue.

asyncrl keys DIR NAME…      make a CURVE key a name, and allow it

Loads nothing heavy until a command runs.
"""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_commands"]


def add_commands(subparsers: Any) -> None:
    """Adds the queue's commands to those of ``asyncrl``."""
    keys = subparsers.add_parser("keys", help="make one CURVE key a name, for a queue that other machines reach")
    keys.add_argument("folder", metavar="DIR", help="folder of key files; made if it is not there")
    keys.add_argument("names", nargs="+", metavar="NAME", help="one for the server and one for each process that may speak with it")
    keys.set_defaults(command=_keys)


def _keys(options: argparse.Namespace) -> int:
    from pathlib import Path

    from asyncrl.queue.keys import make_keys

    for path in make_keys(Path(options.folder), options.names):
        print(path)
    return 0
