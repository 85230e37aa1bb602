"""docs/engines.md and the pages about orchestrators promise only what is shown: each cell has tests, and they exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parent.parent
DOCS = TESTS.parent / "docs"
# Pages with a table about who can use rlbus, whose last column names the tests.
COMPAT = ("compat.md", "http.md")
Cell = tuple[str, str]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each row of each table of a page; the first row is its head, the line below that is left out."""
    found: list[list[list[str]]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            found[-1].append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))])
        before = line
    return [[table[0], *table[2:]] for table in found]


def name_of(row: list[str]) -> str:
    """What stands in its first cell, without a link."""
    return re.sub(r",? \[[^]]*\]\([^)]*\)", "", row[0])


def cells_of_engines(text: str) -> set[Cell]:
    """Row and engine of each cell of the first table; each says something."""
    head, *rows = tables(text)[0]
    engines = [name.strip("`") for name in head[1:]]
    for row in rows:
        assert len(row) == len(head), row
        assert all(row), row
    return {(name_of(row), engine) for row in rows for engine in engines}


def proofs(text: str, engines: set[str]) -> dict[Cell, list[str]]:
    """The tests of each cell."""
    found: dict[Cell, list[str]] = {}
    for row, who, tests in tables(text)[0][1:]:
        named = engines if who == "all" else set(re.findall(r"`([^`]+)`", who))
        for engine in named:
            found.setdefault((row, engine), []).extend(named_tests(tests))
    return found


def named_tests(cell: str) -> list[str]:
    """What stands in backticks in it and is a test."""
    return [name for name in re.findall(r"`([^`]+)`", cell) if "::" in name or "/" in name]


@cache
def functions(path: str) -> set[str]:
    """The tests of a file below tests/; none if there is no such file."""
    file = TESTS / path
    if not file.is_file():
        return set()
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def is_there(name: str) -> bool:
    """Whether it is "path::function" of a test that exists."""
    path, _, function = name.partition("::")
    return function.startswith("test_") and function in functions(path)


def test_each_cell_of_the_table_of_engines_has_tests_and_no_other_has() -> None:
    """Every row on every engine, the cells that say "no" included."""
    cells = cells_of_engines((DOCS / "engines.md").read_text())
    shown = proofs((DOCS / "engines-proofs.md").read_text(), {engine for _, engine in cells})
    assert cells - set(shown) == set()
    assert set(shown) - cells == set()
    assert [cell for cell, tests in shown.items() if not tests] == []


def test_each_test_that_the_table_of_engines_rests_on_exists() -> None:
    """In the file that is named."""
    rows = tables((DOCS / "engines-proofs.md").read_text())[0][1:]
    assert [name for row in rows for name in named_tests(row[-1]) if not is_there(name)] == []


@pytest.mark.parametrize("page", COMPAT)
def test_each_line_about_an_orchestrator_names_tests_that_exist(page: str) -> None:
    """What works and what doesn't, with why."""
    compat = [table for table in tables((DOCS / page).read_text()) if table[0][-1] == "test"]
    assert compat
    for row in (row for table in compat for row in table[1:]):
        assert named_tests(row[-1]), row
        assert [name for name in named_tests(row[-1]) if not is_there(name)] == []


def test_a_page_that_promises_more_is_found_out() -> None:
    """A cell without a test, a row that isn't there, a test that isn't there."""
    page = "| | `a` | `b` |\n|---|---|---|\n| pause, [more](x.md) | yes | no |\n"
    head = "| row | engines | tests |\n|---|---|---|\n"
    assert cells_of_engines(page) == {("pause", "a"), ("pause", "b")}
    assert set(proofs(head + "| pause | `a` | `x.py::test_x` |\n", {"a", "b"})) == {("pause", "a")}
    assert set(proofs(head + "| wake | all | `x.py::test_x` |\n", {"a", "b"})) == {("wake", "a"), ("wake", "b")}
    assert is_there("unit/test_engines_page.py::test_a_page_that_promises_more_is_found_out")
    assert not is_there("unit/test_engines_page.py::test_nothing")
    assert not is_there("unit/test_engines_page.py")
    assert not is_there("unit/test_nothing.py::test_nothing")
