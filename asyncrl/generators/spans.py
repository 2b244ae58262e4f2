"""Which version sampled which token: spans of one response, from exact reports or from cuts under pause. Pure.

An engine that reports spans is believed, after a check that they cover the response. For one that reports none, the adapter cuts:
while the engine stands still for an update, the number of tokens that it has acknowledged for a request is where the new
version begins. Both forms count from the first sampled token and never look at the clock.

Source: design note, section 2; fault B29.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.errors import EngineError
from asyncrl.trajectory import VersionSpan

__all__ = ["Cuts", "spans_from_reports"]


class Cuts:
    """Versions of one running request, stamped at dispatch and at every update since.

    Example:
        >>> cuts = Cuts(version=7)
        >>> cuts.stamp(num_tokens=5, version=8)
        >>> cuts.spans(9)
        (VersionSpan(start=0, version=7), VersionSpan(start=5, version=8))
    """

    def __init__(self, version: int) -> None:
        self._starts: list[tuple[int, int]] = [(0, version)]

    def stamp(self, *, num_tokens: int, version: int) -> None:
        """Tokens from index ``num_tokens`` on are sampled by ``version``.

        Raises:
            EngineError: tokens or versions went backwards, which no engine under pause can do.
        """
        start, before = self._starts[-1]
        if num_tokens < start or version < before:
            raise EngineError(f"a cut moves forward; met token {num_tokens} of version {version} after token {start} of version {before}")
        if num_tokens == start:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((num_tokens, version))

    def spans(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Spans of a response of ``num_tokens`` tokens; those that would begin at or beyond its end are left out."""
        return tuple(VersionSpan(start, version) for start, version in self._starts if start < max(num_tokens, 1))

    def tokens_by_version(self, num_tokens: int) -> dict[int, int]:
        """How many of the first ``num_tokens`` tokens each version sampled."""
        spans = self.spans(num_tokens)
        ends = [span.start for span in spans[1:]] + [num_tokens]
        return {span.version: end - span.start for span, end in zip(spans, ends, strict=True) if end > span.start}


def spans_from_reports(reports: Iterable[tuple[str, int, int]], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Spans from an engine's (label, start, end) reports.

    Raises:
        EngineError: a label that is no version, or reports that do not cover the response without gap or overlap.
    """
    spans, at = [], 0
    found: Sequence[tuple[str, int, int]] = list(reports)
    for label, start, end in found:
        if start != at or end < start or not label.lstrip("-").isdigit():
            raise EngineError(f"an engine's version spans cover {num_tokens} tokens without gap; met {found}")
        if end > start:
            spans.append(VersionSpan(start, int(label)))
        at = end
    if at != num_tokens:
        raise EngineError(f"an engine's version spans cover {num_tokens} tokens; met {found}")
    return tuple(spans)
