"""vLLM 0.25 and its like: the engine reports no versions, so a response is cut at the tokens acknowledged under pause."""

from __future__ import annotations

from typing import Any

from asyncrl.generators.spans import Cuts
from asyncrl.trajectory import VersionSpan

__all__ = ["CutSpans"]


class CutSpans:
    """Takes the adapter's own cuts."""

    name = "cut"

    async def stamp(self, llm: Any, version: int) -> None:
        """Nothing to tell the engine: the adapter has cut."""

    def spans(self, completion: Any, cuts: Cuts) -> tuple[VersionSpan, ...]:
        """Spans cut under pause."""
        return cuts.spans(len(completion.token_ids))
