"""tests/SCENARIOS.md says which tests play which scenario, and what is open. Run as a program, this lists them anew."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parent.parent
MAP = TESTS / "SCENARIOS.md"
# Of the project's shared notes; the gaps are theirs.
NUMBERS = tuple(n for n in range(1, 60) if n not in {20, 24, 28, 36, 38, 40, 42, 44, 52, 53, 56})
_HEADING = re.compile(r"^### (\d+)\. \S.*$")
_LISTED = re.compile(r"^- `(\S+\.py::test_\w+)`$")
_OPEN = re.compile(r"^- Open \((?:issue \d+|[a-z ]+)\): \S.*$")
_SAYS = re.compile(r"SCENARIOS (\d+(?:(?:, | and )\d+)*)")


def scenario_numbers(docstring: str) -> set[int]:
    """The scenarios that a test says it plays."""
    return {int(n) for found in _SAYS.findall(docstring) for n in re.findall(r"\d+", found)}


def said_by_tests() -> dict[int, set[str]]:
    """By scenario: "file::name" of each test whose docstring names it."""
    found: dict[int, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in scenario_numbers(ast.get_docstring(node) or ""):
                    found.setdefault(number, set()).add(f"{path.relative_to(TESTS).as_posix()}::{node.name}")
    return found


def parse(text: str) -> tuple[list[int], dict[int, list[str]], dict[int, list[str]], list[str]]:
    """The headings' numbers in order; the tests and the open points under each; lines that are none of these."""
    numbers: list[int] = []
    listed: dict[int, list[str]] = {}
    opens: dict[int, list[str]] = {}
    strange: list[str] = []
    for line in text[text.index("\n### ") :].splitlines():
        if heading := _HEADING.match(line):
            numbers.append(int(heading[1]))
        elif test := _LISTED.match(line):
            listed.setdefault(numbers[-1], []).append(test[1])
        elif _OPEN.match(line):
            opens.setdefault(numbers[-1], []).append(line)
        elif line:
            strange.append(line)
    return numbers, listed, opens, strange


def problems(text: str, said: dict[int, set[str]]) -> list[str]:
    """What is wrong with a map, given what the tests say of themselves."""
    numbers, listed, opens, strange = parse(text)
    found = [f"neither heading, nor test, nor open point: {line}" for line in strange]
    if numbers != list(NUMBERS):
        found.append(f"numbers are {numbers}")
    for number in NUMBERS:
        here, there = listed.get(number, []), said.get(number, set())
        found += [f"{number}: listed twice: {t}" for t in sorted({t for t in here if here.count(t) > 1})]
        found += [f"{number}: no such test, or it doesn't say so: {t}" for t in sorted(set(here) - there)]
        found += [f"{number}: isn't listed: {t}" for t in sorted(there - set(here))]
        if not here and number not in opens:
            found.append(f"{number}: neither a test nor a reason why there is none")
    return found + [f"no such scenario: {n}, in {sorted(said[n])}" for n in sorted(said.keys() - set(NUMBERS))]


def rewritten(text: str, said: dict[int, set[str]]) -> str:
    """The map with the tests that say so under each heading; headings and open points stay."""
    _, _, opens, _ = parse(text)
    kept = [text[: text.index("\n### ")].rstrip("\n")]
    for heading in (line for line in text.splitlines() if _HEADING.match(line)):
        number = int(heading[4 : heading.index(".")])
        kept += ["", heading, *(f"- `{t}`" for t in sorted(said.get(number, ()))), *opens.get(number, [])]
    return "\n".join(kept) + "\n"


def test_every_scenario_is_played_or_open_for_a_reason() -> None:
    """Each of the 48 once; the tests that are listed are those that say so; run this file to list them anew."""
    assert problems(MAP.read_text(), said_by_tests()) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("### 2. two\n", "", "numbers are"),
        ("- `unit/test_a.py::test_a`\n", "", "1: isn't listed: unit/test_a.py::test_a"),
        ("test_a`", "test_b`", "1: no such test, or it doesn't say so: unit/test_a.py::test_b"),
        ("- Open (issue 4): a reason.\n", "", "2: neither a test nor a reason why there is none"),
        ("- Open (issue 4): a reason.", "- Open: later.", "neither heading, nor test, nor open point: - Open: later."),
    ],
)
def test_a_map_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch, old: str, new: str, problem: str) -> None:
    """A missing number, a test that isn't listed, one that isn't there, and a gap without a reason."""
    monkeypatch.setattr(f"{__name__}.NUMBERS", (1, 2))
    good = "# map\n\n### 1. one\n- `unit/test_a.py::test_a`\n\n### 2. two\n- Open (issue 4): a reason.\n"
    said = {1: {"unit/test_a.py::test_a"}}
    assert problems(good, said) == []
    assert old in good
    assert any(p.startswith(problem) for p in problems(good.replace(old, new), said))


def test_a_docstring_may_name_several_scenarios() -> None:
    """Whatever else it says."""
    assert scenario_numbers("SCENARIOS 18 and 59: a group. SCENARIOS 3, 4 and 5 too; not 6.") == {3, 4, 5, 18, 59}


if __name__ == "__main__":
    MAP.write_text(rewritten(MAP.read_text(), said_by_tests()))
