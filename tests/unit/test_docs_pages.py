"""The pages name tests, options and files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.config.names import option_names
from asyncrl.tasks.rewards import reward_names

ROOT = Path(__file__).parents[2]
NUMBERS = (1, 2, 4, 5, 6, 7, 9, 12, 14, 16, 20, 24, 25, 26, 27, 28, 29, 31, 33, 34, 36, 39, 41, 43, 49, 51, 53, 54, 56, 58, 63)
ROWS = [f"B{number:02d}" for number in NUMBERS]
GROUPS = {name.split(".")[0] for name in option_names() if "." in name}
FILE_ENDINGS = (".py", ".md", ".json", ".jsonl", ".yaml", ".toml", ".txt")


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def test_every_fault_has_a_row_and_every_test_it_names_exists() -> None:
    text = (ROOT / "docs" / "faults.md").read_text()
    defined = {name for file in ROOT.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    lines = dict(re.findall(r"^\| (B\d\d) [SL] (\|.*)$", text, re.MULTILINE))
    assert sorted(lines) == ROWS
    for row, line in lines.items():
        named = re.findall(r"`(test_\w+)`", line)
        assert named or "comes with" in line, f"{row} names neither a test nor where it will be"
        assert [name for name in named if not name.startswith(f"test_{row.lower()}_") or name not in defined] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_names_only_options_that_exist(page: Path) -> None:
    words = re.findall(r"`(\w+\.\w+)(?:=[^`]*)?`", page.read_text())
    options = {word for word in words if word.split(".")[0] in GROUPS and not word.endswith(FILE_ENDINGS)}
    assert not options - set(option_names())


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_links_only_to_files_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_page_of_rewards_lists_each_registered_one() -> None:
    lines = (ROOT / "docs" / "data.md").read_text().partition("\n## Rewards\n")[2].splitlines()
    assert [name for name in reward_names() if not any(line.startswith(f"| `{name}` | ") for line in lines)] == []
