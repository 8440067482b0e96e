"""docs/records.md names files, settings, values and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hotlap.config import Config
from hotlap.recipes import RECIPES, resolve
from hotlap.settings import flatten, parse

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "records.md").read_text()
LINE = list(RECIPES)[list(RECIPES).index("window-warmup") : list(RECIPES).index("softcap") + 1]


def table_rows(page: str) -> list[list[str]]:
    """The cells of the tables with four columns, without their heads."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == 4]
    return [row for row in cells if row[0] != "part" and set(row[0]) != {"-"}]


ROWS = table_rows(PAGE)

# Settings, with or without a value, and in brackets the recipe that has these values; without, all have them.
SELECTION = re.compile(r"((?:`[a-z_0-9.]+(?:=[^`]+)?`(?:, )?)+)(?: \(`([a-z-]+)`\))?")


def test_the_tables_are_read():
    assert len(ROWS) == len(re.findall(r"^\|.*::test_", PAGE, flags=re.MULTILINE)) > 50


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_files_and_tests_exist(row):
    _, where, _, pinned_by = row
    files = re.findall(r"`([^`]+)`", where)
    assert files
    for name in files:
        assert (ROOT / "hotlap" / name).is_file(), name
    tests = re.findall(r"`([^`]+)`", pinned_by)
    assert tests
    for name in tests:
        file, function = name.split("::")
        text = (ROOT / "tests" / f"{file}.py").read_text()
        assert re.search(rf"^\s*def {function}\(", text, flags=re.MULTILINE), name


@pytest.mark.parametrize("row", [row for row in ROWS if row[2] != "–"], ids=lambda row: row[0])
def test_settings_exist_and_their_values_are_those_of_the_recipes(row):
    selected_by = row[2]
    for group, recipe in SELECTION.findall(selected_by):
        for text in re.findall(r"`([^`]+)`", group):
            name, _, value = text.partition("=")
            assert name in flatten(Config()), name
            if value:
                expected = parse(Config, {name: value})[name]
                for chosen in [recipe] if recipe else LINE:
                    assert flatten(resolve(chosen, "small"))[name] == expected, (chosen, text)
    not_understood = SELECTION.sub("", selected_by)
    assert not not_understood.strip(", ")
