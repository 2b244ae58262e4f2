"""One suite for this folder: its ranks, its plain runs, and the result of each cell, run once. Its ranks end with the folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines.suite import Suite
from engines.target import Target


@pytest.fixture(scope="package")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    with Suite(tmp_path_factory.mktemp("engines"), Target.from_environment()) as opened:
        yield opened
