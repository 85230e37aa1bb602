"""What users import for their own tests."""

import subprocess
import sys

import pytest

import rlbus.testing
from rlbus.bus import Bus
from rlbus.schemas import GetFleet
from rlbus.testing import Faults, LoopClock, MemoryBroker, run, sequential_ids

pytestmark = pytest.mark.unit


def test_every_public_name_is_there() -> None:
    """`__all__` has no dead entry."""
    missing = [name for name in rlbus.testing.__all__ if not hasattr(rlbus.testing, name)]
    assert missing == []


def test_a_faulty_scenario_runs_the_same_every_time() -> None:
    """Faults, ids and times come from seeds alone."""

    async def scenario() -> list[tuple[float, str]]:
        broker = MemoryBroker(seed=11)
        faults = Faults(drop=0.2, duplicate=0.2, reorder=0.2, delay_s=(0.0, 0.1))
        clock = LoopClock()
        a = Bus(broker.connect(faults=faults), clock=clock, new_id=sequential_ids("op"))
        b = Bus(broker.connect(faults=faults), clock=clock)
        seen: list[tuple[float, str]] = []
        b.subscribe("x", GetFleet, lambda m, _: seen.append((clock.now(), m.op_id)))
        await b.barrier(1)
        for _ in range(30):
            a.publish("x", GetFleet(op_id=a.new_id()))
        await a.barrier(10)
        await b.barrier(10)
        await a.aclose()
        await b.aclose()
        return seen

    first = run(scenario())
    assert run(scenario()) == first
    assert len(first) > 10


def test_importing_it_needs_no_torch() -> None:
    """Users' control-plane tests stay light."""
    code = "import sys, rlbus.testing; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
