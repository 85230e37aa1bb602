"""How the contract suite runs on a case: started once, by one process, or skipped with the reason."""

import os
from collections.abc import Iterable

import pytest

from rlbus.workers.engines.contract import EngineCase

# "1", as `make test-peers` sets it: a case whose program isn't there fails. "0", as `make test` does: those of others'
# programs are left to `make test-peers`. Without it what is there is run.
VARIABLE = "PEERS_REQUIRED"


def params_of(cases: Iterable[EngineCase]) -> list[object]:
    """For a fixture of a session or module."""
    required = os.environ.get(VARIABLE)
    params: list[object] = []
    for case in cases:
        why = "runs in `make test-peers`" if required == "0" and case.is_peer else case.needs()
        skip = [pytest.mark.skip(reason=why)] if why and required != "1" else []
        # The first test of a case starts its engine; the limit of all other tests would cut that short.
        limit = pytest.mark.timeout(case.open_s + case.limit_s)
        params.append(pytest.param(case, id=case.name, marks=[limit, *skip]))
    return params
