"""The simulation in small: 200 seeds hold, planted bugs are caught, and a seed is one and the same run everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.bugs import BUGS
from tests.simulation.running import MAX_BUG_SEEDS, find_bug, simulate

# Seconds of CPU, and minutes on a machine that others use; whoever waits for ever is found by the loop itself.
pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NUM_SEEDS, SEEDS_PER_TEST = 200, 25
NUM_SEEDS_WITH_SLEEPS = 50


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_invariant_holds(first: int) -> None:
    """After every drawn run; a seed that fails is replayed by `python -m tests.simulation --seed N -v`."""
    runs = [simulate(seed) for seed in range(first, first + SEEDS_PER_TEST)]
    assert {run.seed: [str(v) for v in run.violations] for run in runs if not run.is_ok} == {}
    assert sum(run.num_tokens for run in runs) > 100
    assert sum(run.num_messages for run in runs) > 1000


@pytest.mark.parametrize("first", range(0, NUM_SEEDS_WITH_SLEEPS, SEEDS_PER_TEST))
def test_every_invariant_holds_while_engines_sleep_and_wake(first: int) -> None:
    """Nothing touches memory that sleeps, and once they are woken everybody comes to the fleet's version."""
    runs = [simulate(seed, has_sleeps=True) for seed in range(first, first + SEEDS_PER_TEST)]
    assert {run.seed: [str(v) for v in run.violations] for run in runs if not run.is_ok} == {}
    assert sum(run.num_tokens for run in runs) > 100


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str) -> None:
    """By the invariant that it breaks: one seed, as a rule, and some minutes where a change has moved it."""
    assert find_bug(name, MAX_BUG_SEEDS) is not None


def test_seed_is_the_same_run_in_every_process() -> None:
    """Whatever the hash seed: every message and every engine call at the same virtual time."""
    outputs = [_digests(hash_seed) for hash_seed in ("0", "1")]
    assert outputs[0] == outputs[1]
    assert [line.split()[0] for line in outputs[0]] == [str(seed) for seed in range(20)]


def _digests(hash_seed: str) -> list[str]:
    out = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seeds", "20", "--processes", "1", "--no-planted", "--digest"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return out.stdout.splitlines()[:-1]
