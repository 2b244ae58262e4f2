"""Every cell of every engine against one plain float32 process, and that no cell stays out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.learner.registry import EngineRegistry
from engines.cells import CELLS, Cell
from engines.page import figures_of, limits, render, row_of
from engines.suite import Suite, cells_of
from engines.target import Target

pytestmark = pytest.mark.real

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "engines.md"
ON_A_CPU = Target(device="cpu", dtype="float32")


@pytest.mark.parametrize("shared_prompt", [True, False], ids=["prompts shared", "prompts repeated"])
@pytest.mark.parametrize("cell", cells_of(Target.from_environment()), ids=lambda cell: str(cell).replace("×", "x"))
def test_a_cell_agrees_with_one_plain_process(suite: Suite, cell: Cell, shared_prompt: bool):
    suite.verdict(cell, shared_prompt=shared_prompt)


def test_b54_many_micro_batches_against_none_do_not_hang(suite: Suite):
    (cell,) = (cell for cell in CELLS if str(cell) == "fsdp2 DP2")
    busy, idle = suite.ranks_run(cell, "sgd")
    assert busy.micro_batches == idle.micro_batches
    assert busy.micro_batches[1] >= 4
    assert (busy.packed_tokens[1] > 0, idle.packed_tokens[1]) == (True, 0)
    assert (busy.packed_tokens[2], idle.packed_tokens[2] > 0) == (0, True)


def test_a_shared_prompt_is_computed_once(suite: Suite):
    shared, repeated = (suite.ranks_run(CELLS[0], "sgd", shared_prompt=shared)[0] for shared in (True, False))
    assert all(few < many for few, many in zip(shared.packed_tokens, repeated.packed_tokens, strict=True))


def test_every_engine_has_cells_and_a_cpu_runs_all_of_them():
    assert {cell.backend for cell in CELLS} == set(EngineRegistry.backends())
    assert cells_of(ON_A_CPU) == CELLS
    assert len({str(cell) for cell in CELLS}) == len(CELLS)


def test_no_test_of_this_folder_can_be_left_out():
    for file in Path(__file__).parent.glob("*.py"):
        assert not re.search(r"pytest\.(mark\.)?(skip|xfail|importorskip)", file.read_text()), file


def test_the_page_lists_exactly_the_cells_and_all_hold(suite: Suite):
    verdicts = []
    for cell in cells_of(suite.target):
        shared, repeated = (suite.verdict(cell, shared_prompt=shared) for shared in (True, False))
        verdicts.append((cell, shared.worst(repeated)))
    suite.target.write_page(render(verdicts, suite.target.bounds))
    figures = figures_of(PAGE.read_text())
    assert set(figures) == {row_of(cell) for cell in CELLS}, "the page is of other cells: write it again, as it says itself"
    for cell, met in figures.items():
        assert all(figure <= limit for figure, limit in zip(met, limits(ON_A_CPU.bounds), strict=True)), cell
