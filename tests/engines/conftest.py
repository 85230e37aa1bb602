"""Finds the engines that the contract suite runs on: every `cases_<name>.py` beside this file with a constant `CASE`.

One engine is started per case and session, when its first test needs it; one process runs all tests of a case. A case
whose program isn't there is skipped; with PEERS_REQUIRED=1, as `make test-peers` sets it, each of its tests fails; with
0, as `make test` does, the programs of others are skipped in any case.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbus.workers.engines.contract import CaseRunner, EngineCase
from tests.engines.params import params_of


def _case(path: Path) -> EngineCase:
    spec = importlib.util.spec_from_file_location(f"rlbus_engine_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    case = module.CASE
    assert isinstance(case, EngineCase)
    return case


def _cases() -> Iterator[EngineCase]:
    return map(_case, sorted(Path(__file__).parent.glob("cases_*.py")))


@pytest.fixture(scope="session", params=params_of(_cases()))
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseRunner]:
    """The opened engine of one case."""
    case: EngineCase = request.param
    if needs := case.needs():
        pytest.fail(f"{case.name} {needs}, and PEERS_REQUIRED is set", pytrace=False)
    runner = CaseRunner(case, tmp_path_factory.mktemp(case.name))
    try:
        runner.start()
        yield runner
    finally:
        runner.close()
