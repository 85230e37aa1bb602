"""Finds the engines that the contract suite runs on: every `cases_<name>.py` beside this file with a constant `CASE`.

One engine is started per case and session, when its first test needs it; one process runs all tests of a case. A case
whose program isn't there is skipped; with PEERS_REQUIRED=1, as `make test-peers` sets it, each of its tests fails.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbus.workers.engines.contract import CaseRunner, EngineCase


def _case(path: Path) -> EngineCase:
    spec = importlib.util.spec_from_file_location(f"rlbus_engine_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    case = module.CASE
    assert isinstance(case, EngineCase)
    return case


def _params() -> list[object]:
    is_required = os.environ.get("PEERS_REQUIRED") == "1"
    params: list[object] = []
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        case = _case(path)
        needs = case.needs()
        skip = [pytest.mark.skip(reason=needs)] if needs and not is_required else []
        # The first test of a case starts its engine; the limit of all other tests would cut that short.
        limit = pytest.mark.timeout(case.open_s + case.limit_s)
        group = pytest.mark.xdist_group(case.name)
        params.append(pytest.param(case, id=case.name, marks=[limit, group, *skip]))
    return params


@pytest.fixture(scope="session", params=_params())
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
