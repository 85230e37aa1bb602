"""docs/faults.md promises only what is proven: each row names cases or tests that exist, and each case has a row."""

import ast
import re
from pathlib import Path

import pytest

from tests.chaos.cases import CASES

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
NUM_COLUMNS = 6


def rows() -> list[list[str]]:
    """The cells of each row of the table, without its head."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def proofs(row: list[str]) -> list[str]:
    """What stands in backticks in its last cell."""
    return re.findall(r"`([^`]+)`", row[-1])


def test_each_row_is_complete_and_names_its_proof() -> None:
    """What failed, when, what you see, what rlbus does, what you do, proven by."""
    assert len(rows()) > 15
    for row in rows():
        assert len(row) == NUM_COLUMNS, row
        assert all(row), row
        assert proofs(row), row


def test_each_proof_exists() -> None:
    """A case of `make chaos`, or a test in the file that is named."""
    cases = {case.name for case in CASES}
    for name in (name for row in rows() for name in proofs(row)):
        path, _, function = name.partition("::")
        if not function:
            assert name in cases
            continue
        tree = ast.parse((ROOT / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_each_case_is_named_in_a_row() -> None:
    """So that whoever sees it break finds what it means."""
    named = {name for row in rows() for name in proofs(row)}
    assert {case.name for case in CASES} - named == set()
