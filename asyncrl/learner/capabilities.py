"""What an engine class says of itself. Loads without torch."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.refusals import Refusal

__all__ = ["Capabilities"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine offers; which model types and devices it serves its registration says.

    Attributes:
        models: which models it trains, in words.
        layouts: how ranks can share the work, in words.
        refused: what is refused when options are read, each with the nearest that works.
    """

    models: str
    layouts: tuple[str, ...]
    refused: tuple[Refusal, ...]
