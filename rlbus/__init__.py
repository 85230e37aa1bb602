"""rlbus: keeps a fleet of LLM inference engines in step with a trainer, over NATS.

```python
import rlbus

with rlbus.Trainer("nats://...", namespace="prod") as trainer:
    trainer.wait_ready(world_size=16)
    report = trainer.update_weights(model, version=step)
```
Names are loaded on first use, so that `import rlbus` is quick and needs neither torch nor an engine.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlbus.client import EventStream, FleetClient
    from rlbus.config import BusConfig
    from rlbus.errors import (
        AsleepError,
        BrokenError,
        BusyError,
        ClosedError,
        ConfigError,
        DeadlineError,
        DecodeError,
        EngineDeadError,
        EngineError,
        FaultError,
        ManifestError,
        NoWorkerError,
        PartialError,
        PayloadTooLargeError,
        RefusedError,
        RLBusError,
        StaleError,
        TornWeightsError,
        TransferError,
        VersionRegressionError,
        WrongStateError,
    )
    from rlbus.reports import UpdateReport
    from rlbus.schemas import FleetView, Outcome, PauseMode, Report, SleepTag, Target, Version
    from rlbus.server import EmbeddedServer
    from rlbus.session import Session, connect
    from rlbus.sync import Trainer
    from rlbus.sync_client import BusWeightSyncClient
    from rlbus.trainer import Trainer as AsyncTrainer

__all__ = [
    # Trainer, without and with asyncio
    "Trainer",
    "AsyncTrainer",
    "UpdateReport",
    "BusWeightSyncClient",
    # Connection and fleet
    "connect",
    "Session",
    "FleetClient",
    "EventStream",
    "BusConfig",
    "EmbeddedServer",
    # Words of the wire that users pass and read
    "Version",
    "Target",
    "PauseMode",
    "SleepTag",
    "Report",
    "Outcome",
    "FleetView",
    # Errors
    "RLBusError",
    "ConfigError",
    "ClosedError",
    "BrokenError",
    "DeadlineError",
    "PayloadTooLargeError",
    "DecodeError",
    "TransferError",
    "FaultError",
    "RefusedError",
    "BusyError",
    "NoWorkerError",
    "StaleError",
    "WrongStateError",
    "AsleepError",
    "VersionRegressionError",
    "ManifestError",
    "EngineError",
    "EngineDeadError",
    "TornWeightsError",
    "PartialError",
    "__version__",
]

__version__ = "0.1.0"

# Public name -> (module, name in it).
_HOMES: dict[str, tuple[str, str]] = {
    "Trainer": ("rlbus.sync", "Trainer"),
    "AsyncTrainer": ("rlbus.trainer", "Trainer"),
    "UpdateReport": ("rlbus.reports", "UpdateReport"),
    "BusWeightSyncClient": ("rlbus.sync_client", "BusWeightSyncClient"),
    "connect": ("rlbus.session", "connect"),
    "Session": ("rlbus.session", "Session"),
    "FleetClient": ("rlbus.client", "FleetClient"),
    "EventStream": ("rlbus.client", "EventStream"),
    "BusConfig": ("rlbus.config", "BusConfig"),
    "EmbeddedServer": ("rlbus.server", "EmbeddedServer"),
    **{
        name: ("rlbus.schemas", name)
        for name in ("Version", "Target", "PauseMode", "SleepTag", "Report", "Outcome", "FleetView")
    },
    **{name: ("rlbus.errors", name) for name in __all__ if name.endswith("Error")},
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rlbus' has no attribute {name!r}")
    value = getattr(importlib.import_module(home[0]), home[1])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
