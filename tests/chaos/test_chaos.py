"""`make chaos` in small: the quick cases hold on a fleet of real processes, and the command lists and refuses cases.

A case that breaks is looked at with `python -m tests.chaos --only NAME --keep DIR`.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.__main__ import run_cases
from tests.chaos.cases import CASES
from tests.chaos.judge import is_of_the_machine
from tests.chaos.table import Row
from tests.tries import TRIES

pytestmark = [pytest.mark.faults, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
QUICK = [case for case in CASES if case.is_quick]


@pytest.mark.timeout(900)
def test_the_quick_cases_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """In mid-broadcast, one after the other on the same fleet. One that the machine came between is run again."""
    ended: dict[str, Row] = {}
    left = QUICK
    for _ in range(TRIES):
        with capsys.disabled():
            print()
            rows = asyncio.run(run_cases(left))
        ended |= {row.case.name: row for row in rows}
        left = [row.case for row in rows if row.broken and is_of_the_machine(row.broken, row.seen)]
        if not left:
            break
    assert {name: row.broken for name, row in ended.items() if row.broken} == {}
    assert len(ended) == len(QUICK) >= 2
    assert all(row.seen is not None and row.seen.phase_hit.startswith("transfer") for row in ended.values())


def test_the_command_lists_cases_and_refuses_unknown_ones() -> None:
    """Without starting anything."""
    listed = _chaos("--list", "--engine", "torch")
    assert listed.returncode == 0
    assert listed.stdout.split() == [case.name for case in CASES if case.engine == "torch"]
    refused = _chaos("--only", "no-such-case")
    assert refused.returncode == 2
    assert "no such case: no-such-case" in refused.stderr


def _chaos(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.chaos", *argv], cwd=ROOT, capture_output=True, text=True, timeout=200.0
    )
