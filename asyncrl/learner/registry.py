"""Finds an engine by (model type, backend, device, vendor).

An engine is one module that registers its class when it is imported; the registry knows where each backend's module is and imports
it when it is asked for. Loads without torch, so that it can say of an environment without torch what is missing there.

Source: design note, section 5.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from asyncrl.errors import UnsupportedError

if TYPE_CHECKING:
    from asyncrl.learner.engine import Engine

__all__ = ["Backend", "EngineKey", "EngineRegistry", "vendor_of"]

_E = TypeVar("_E", bound="type[Engine]")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class EngineKey:
    """``model_type`` is ``language_model`` or ``value_model``; an empty ``vendor`` stands for any."""

    model_type: str
    backend: str
    device: str
    vendor: str = ""

    def __str__(self) -> str:
        return f"{self.model_type}/{self.backend} on {self.device} ({self.vendor or 'any vendor'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Where a backend is registered, and the extra of this package that brings what it imports."""

    module: str
    extra: str


class EngineRegistry:
    """Engine classes by key.

    Looked up as (device, vendor), then the device with any vendor, then, on CUDA devices of other vendors, what is registered for
    NVIDIA. A backend whose module does not import is named with its true import error.
    """

    _classes: ClassVar[dict[EngineKey, type[Engine]]] = {}
    _backends: ClassVar[dict[str, Backend]] = {
        "fsdp2": Backend(module="asyncrl.learner.fsdp2", extra="learner"),
        "megatron": Backend(module="asyncrl.learner.megatron.engine", extra="megatron"),
    }

    @classmethod
    def register(cls, *, model_type: str, backend: str, devices: tuple[str, ...], vendor: str = "") -> Callable[[_E], _E]:
        """Registers a class at import; an empty vendor stands for any."""

        def add(engine: _E) -> _E:
            for device in devices:
                cls._classes[EngineKey(model_type=model_type, backend=backend, device=device, vendor=vendor)] = engine
            return engine

        return add

    @classmethod
    def find(cls, *, model_type: str, backend: str, device: str, vendor: str = "") -> type[Engine]:
        """The class for a key.

        Raises:
            UnsupportedError: nothing is registered for it, or its module does not import; lists what is registered.
        """
        import_error = cls.load(backend)
        asked = EngineKey(model_type=model_type, backend=backend, device=device, vendor=vendor)
        for place in ((device, vendor), (device, ""), *([("cuda", "nvidia")] if device == "cuda" and vendor != "nvidia" else [])):
            found = cls._classes.get(EngineKey(model_type=model_type, backend=backend, device=place[0], vendor=place[1]))
            if found is not None:
                return found
        raise UnsupportedError(
            f"there is no engine {asked}"
            + (f"; its module does not import: {import_error}" if import_error else "")
            + f"; registered: {'; '.join(map(str, cls.keys())) or 'none'}"
        )

    @classmethod
    def backends(cls) -> tuple[str, ...]:
        """Names of all backends, whether or not they import here."""
        return tuple(sorted(cls._backends))

    @classmethod
    def keys(cls, backend: str = "") -> tuple[EngineKey, ...]:
        """What is registered now, of one backend or of all."""
        return tuple(key for key in sorted(cls._classes) if backend in ("", key.backend))

    @classmethod
    def engine_of(cls, key: EngineKey) -> type[Engine]:
        """The class that is registered under exactly this key."""
        return cls._classes[key]

    @classmethod
    def load(cls, backend: str) -> str:
        """Imports a backend's module, which registers it; the error and the extra to install where it does not import, else empty."""
        place = cls._backends.get(backend)
        if place is None:
            return ""
        try:
            importlib.import_module(place.module)
        except (ImportError, OSError, UnsupportedError) as error:  # also a shared library that is missing, a version that does not fit
            return f"{type(error).__name__}: {error} (pip install 'asyncrl[{place.extra}]')"
        return ""


def vendor_of(device: str) -> str:
    """Who made the devices that torch calls ``cuda``: ``nvidia`` or ``amd``; empty for others."""
    import torch

    if device != "cuda":
        return ""
    return "amd" if torch.version.hip else "nvidia"
