"""Spans of one response, worked out by hand."""

from __future__ import annotations

import pytest

from asyncrl.errors import EngineError
from asyncrl.generators.spans import Cuts, spans_from_reports
from asyncrl.trajectory import VersionSpan


def test_an_update_after_five_tokens_begins_a_span_at_the_sixth():
    cuts = Cuts(version=7)
    cuts.stamp(num_tokens=5, version=8)
    assert cuts.spans(9) == (VersionSpan(0, 7), VersionSpan(5, 8))
    assert cuts.tokens_by_version(9) == {7: 5, 8: 4}


def test_an_update_before_the_first_token_leaves_no_trace_of_the_version_before():
    cuts = Cuts(version=7)
    cuts.stamp(num_tokens=0, version=8)
    cuts.stamp(num_tokens=0, version=9)
    assert cuts.spans(3) == (VersionSpan(0, 9),)


def test_two_updates_without_a_token_between_them_leave_the_later_one():
    cuts = Cuts(version=1)
    cuts.stamp(num_tokens=4, version=2)
    cuts.stamp(num_tokens=4, version=3)
    assert cuts.spans(6) == (VersionSpan(0, 1), VersionSpan(4, 3))


def test_an_update_after_the_last_token_belongs_to_nobody():
    cuts = Cuts(version=1)
    cuts.stamp(num_tokens=4, version=2)
    assert cuts.spans(4) == (VersionSpan(0, 1),)
    assert cuts.tokens_by_version(4) == {1: 4}


def test_the_same_version_loaded_again_begins_no_span():
    cuts = Cuts(version=3)
    cuts.stamp(num_tokens=2, version=3)
    assert cuts.spans(5) == (VersionSpan(0, 3),)


@pytest.mark.parametrize(("num_tokens", "version"), [(3, 9), (6, 7)])
def test_b31_a_cut_never_goes_back_in_tokens_or_versions(num_tokens, version):
    cuts = Cuts(version=7)
    cuts.stamp(num_tokens=5, version=8)
    with pytest.raises(EngineError, match="a cut moves forward"):
        cuts.stamp(num_tokens=num_tokens, version=version)


def test_reports_of_an_engine_become_spans():
    assert spans_from_reports([("7", 0, 5), ("8", 5, 9)], 9) == (VersionSpan(0, 7), VersionSpan(5, 8))


@pytest.mark.parametrize(
    "reports",
    [[("7", 0, 5)], [("7", 0, 5), ("8", 6, 9)], [("7", 1, 9)], [("default", 0, 9)], []],
    ids=["short", "gap", "late start", "no version", "none"],
)
def test_reports_that_do_not_cover_the_response_are_an_error(reports):
    with pytest.raises(EngineError, match="cover 9 tokens"):
        spans_from_reports(reports, 9)
