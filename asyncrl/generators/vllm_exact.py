"""vLLM 0.32 and its like: every output carries the label of the weights that sampled it."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import EngineError
from asyncrl.generators.spans import Cuts, spans_from_reports
from asyncrl.trajectory import VersionSpan

__all__ = ["ExactSpans"]


class ExactSpans:
    """Labels the weights with their version and reads the spans back."""

    name = "exact"

    async def stamp(self, llm: Any, version: int) -> None:
        """Labels the weights while nothing runs."""
        await llm.update_weight_version(str(version))

    def spans(self, completion: Any, cuts: Cuts) -> tuple[VersionSpan, ...]:
        """The engine's own spans.

        Raises:
            EngineError: it reports none, or spans that do not cover the response.
        """
        if completion.weight_versions is None:
            raise EngineError(f"vLLM reports the weight version of every token; met none for {len(completion.token_ids)} tokens")
        reports = [(span.version, span.start, span.end) for span in completion.weight_versions]
        return spans_from_reports(reports, len(completion.token_ids))
