"""Each refusal has an HTTP status of its own on both servers: a client that retries on 500 would do it for ever."""

from collections.abc import Mapping

import pytest

from rlbus.controller.http import answers
from rlbus.schemas import FaultCode
from rlbus.workers.checks import REFUSALS
from rlbus.workers.system import calls

pytestmark = pytest.mark.unit

# What another try, another worker or another server helps; every other refusal is the caller's (4xx).
LATER = {FaultCode.NO_ROUTE: 501, FaultCode.BUSY: 503, FaultCode.STALE_TERM: 503, FaultCode.EXPIRED: 504}


@pytest.mark.parametrize("code", sorted(REFUSALS))
@pytest.mark.parametrize("statuses", [answers.STATUS_OF, calls.STATUS_OF], ids=["controller", "worker"])
def test_no_refusal_is_an_internal_error(statuses: Mapping[FaultCode, int], code: FaultCode) -> None:
    """Audit of issue 4, 10."""
    assert code in statuses
    assert statuses[code] < 500 or statuses[code] == LATER[code]


@pytest.mark.parametrize("statuses", [answers.STATUS_OF, calls.STATUS_OF], ids=["controller", "worker"])
def test_what_the_state_forbids_is_a_conflict(statuses: Mapping[FaultCode, int]) -> None:
    """A sleeping worker, full places, a revision that stands for other bytes."""
    codes = (FaultCode.ASLEEP, FaultCode.NO_CAPACITY, FaultCode.REVISION_TAKEN)
    assert [statuses[code] for code in codes] == [409, 409, 409]
