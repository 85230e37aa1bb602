"""What every test may rely on, wherever it is run from."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# The same examples in every run, however slow the machine: what a run finds, the next finds, too. Others are drawn with
# `--hypothesis-profile=default`.
settings.register_profile(
    "rlbus", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("rlbus")

ENGINES = {path.stem.removeprefix("cases_") for path in Path(__file__).parent.glob("engines/cases_*.py")}

# A shell starts what it runs in the background with Ctrl-C ignored, and every process below inherits that: there a test
# that interrupts itself, or a program that it started, would wait in vain. The default is what a terminal gives.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class ByEngine(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
    """A file goes to one process as a whole; of the contract suite, the tests of an engine, which share its start."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        folder, _, file = path.rpartition("/")
        if not folder.endswith("tests/engines"):
            return path
        engine = next((word for word in re.split(r"[^a-z_]+", name.partition("[")[2]) if word in ENGINES), path)
        return f"{engine} with a draft" if file == "test_contract_draft.py" else engine


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByEngine:
    """xdist's own (3.8) has no scope for parameters, and its groups don't work with pytest 9."""
    return ByEngine(config, log)
