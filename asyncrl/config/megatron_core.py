"""Which megatron-core ``learner.engine=megatron`` computes with; told without importing it."""

from __future__ import annotations

import importlib.metadata

from asyncrl.errors import UnsupportedError

__all__ = ["VERSIONS", "installed_version"]

VERSIONS = ("0.16.1", "0.19.2")
"""That the table of weights and the stand-ins on a CPU are known to fit: on Python 3.11, and from 3.12 on."""


def installed_version() -> str:
    """The version here.

    Raises:
        ImportError: it is not installed.
        UnsupportedError: another version.
    """
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError("megatron-core is not installed") from error
    if version not in VERSIONS:
        raise UnsupportedError(
            f"megatron-core is {' or '.join(VERSIONS)}; met {version}: pip install megatron-core=={VERSIONS[0]} on Python 3.11, "
            f"=={VERSIONS[1]} on 3.12"
        )
    return version
