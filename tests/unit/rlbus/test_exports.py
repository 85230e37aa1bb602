"""What `import rlbus` gives, and what it must not cost."""

import json
import subprocess
import sys

import pytest

import rlbus

pytestmark = pytest.mark.unit

HEAVY = {"torch", "vllm", "numpy", "nats", "typer", "rich", "starlette", "uvicorn", "httpx"}
PROBE = """
import json, sys, time
before = set(sys.modules)
started = time.perf_counter()
import rlbus
took_s = time.perf_counter() - started
rlbus.connect, rlbus.Trainer, rlbus.FleetClient
print(json.dumps({"took_s": took_s, "modules": sorted({m.partition(".")[0] for m in set(sys.modules) - before})}))
"""


def test_every_public_name_exists_and_nothing_else_is_promised() -> None:
    """`__all__` has no duplicates, and each name loads."""
    assert len(set(rlbus.__all__)) == len(rlbus.__all__)
    for name in rlbus.__all__:
        assert getattr(rlbus, name) is not None, name
    assert set(rlbus.__all__) <= set(dir(rlbus))


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="module 'rlbus' has no attribute 'nonsense'"):
        _ = rlbus.nonsense


def test_the_trainers_are_the_sync_and_the_async_one() -> None:
    """The short name is the one for plain scripts."""
    assert (rlbus.Trainer.__module__, rlbus.AsyncTrainer.__module__) == ("rlbus.sync", "rlbus.trainer")


def test_importing_is_quick_and_needs_no_heavy_library() -> None:
    """Under 0.3 s, at best; neither torch nor vllm nor nats nor the CLI's libraries, also once the names are used."""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60)
        seen = json.loads(done.stdout)
        if seen["took_s"] < 0.3:
            break
    assert seen["took_s"] < 0.3
    assert not {"torch", "vllm", "numpy", "nats", "typer", "rich", "starlette", "uvicorn", "httpx"} & set(
        seen["modules"]
    )
