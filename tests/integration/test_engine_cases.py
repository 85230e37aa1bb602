"""How the contract suite finds its engines: one whose program isn't there is passed over by `make test`, and never by
`make test-peers`.
"""

import subprocess
from pathlib import Path

import pytest

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
ABSENT = """
from rlbus.workers.engines.contract import EngineCase

CASE = EngineCase(name="absent", open=lambda folder: None, missing=lambda: "a program")
"""
TEST = """
def test_something(runner):
    pass
"""
PATIENT = """
import contextlib

from rlbus.workers.engines.contract import EngineCase


@contextlib.asynccontextmanager
async def _open(folder):
    yield None


CASE = EngineCase(name="patient", open=_open, open_s=300.0, limit_s=60.0)
"""
TEST_OF_THE_LIMIT = """
def test_something(runner, request):
    assert request.node.get_closest_marker("timeout").args == (360.0,)
"""
# What `make` takes to say what it would do, on a machine under load.
MAKE_S = 60.0


def run(pytester: pytest.Pytester, case: str = ABSENT, test: str = TEST) -> pytest.RunResult:
    """One test with the suite's own conftest and one case, by default one whose program is missing."""
    pytester.makeconftest((ROOT / "tests" / "engines" / "conftest.py").read_text())
    pytester.makepyfile(cases_one=case, test_suite=test)
    return pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")


def test_a_missing_program_is_skipped_with_its_name_in_a_plain_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `make test` does on a machine that has only vLLM."""
    monkeypatch.delenv("PEERS_REQUIRED", raising=False)
    done = run(pytester)
    done.assert_outcomes(skipped=1)
    done.stdout.fnmatch_lines(["SKIPPED*: needs a program"])


def test_a_program_of_others_that_is_there_is_left_to_the_tests_with_peers(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make test` does the same whether they were fetched or not."""
    monkeypatch.setenv("PEERS_REQUIRED", "0")
    done = run(pytester, PATIENT.replace("open_s", "is_peer=True, open_s"))
    done.assert_outcomes(skipped=1)
    done.stdout.fnmatch_lines(["SKIPPED*: runs in `make test-peers`"])
    run(pytester, PATIENT).assert_outcomes(passed=1)


def test_a_missing_program_fails_where_peers_are_required(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is to prove something on it doesn't end green without it."""
    monkeypatch.setenv("PEERS_REQUIRED", "1")
    done = run(pytester)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["absent needs a program, and PEERS_REQUIRED is set"])


def test_the_start_of_an_engine_has_the_time_that_its_case_gives_it(pytester: pytest.Pytester) -> None:
    """And not that of any test: a real program takes minutes on a machine under load."""
    run(pytester, PATIENT, TEST_OF_THE_LIMIT).assert_outcomes(passed=1)


def test_the_target_of_the_makefile_requires_them() -> None:
    """`make test-peers` sets it for the contract suite."""
    argv = ["make", "--dry-run", "--always-make", "test-peers"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=MAKE_S, check=True)
    (suite,) = (line for line in done.stdout.splitlines() if "pytest tests/engines" in line)
    assert suite.startswith("PEERS_REQUIRED=1 ")
