"""For tests of rlbus and of what is built on it: a bus in memory, with faults by seed, under virtual time.

```python
from rlbus.bus import Bus
from rlbus.testing import LoopClock, MemoryBroker, run

async def scenario() -> None:
    broker = MemoryBroker()
    async with Bus(broker.connect(), clock=LoopClock()) as bus:
        ...

run(scenario())  # an hour of heartbeats takes no real time
```

Work in threads moves no time either, unless it hangs: a thread that is meant to says so with `hangs`.
"""

from rlbus._kv_memory import MemoryKv
from rlbus._memory import Faults, MemoryBroker, MemorySubscription, MemoryTransport
from rlbus._virtual import LOOP_CLOCK_START, LoopClock, VirtualTimeLoop, hangs, run, sequential_ids

__all__ = [
    "LOOP_CLOCK_START",
    "Faults",
    "LoopClock",
    "MemoryBroker",
    "MemoryKv",
    "MemorySubscription",
    "MemoryTransport",
    "VirtualTimeLoop",
    "hangs",
    "run",
    "sequential_ids",
]
