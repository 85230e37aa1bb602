"""Runs seeds: one, or many over several processes."""

import asyncio
import contextlib
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

from rlbus.controller import catching_up, leader
from rlbus.errors import RLBusError
from tests.simulation.bugs import BUGS, planted
from tests.simulation.scenario import draw
from tests.simulation.sleeping import with_sleeps
from tests.simulation.stopping import SimulationLoop, StoppableLoop
from tests.simulation.truth import TAIL_LEN, Truth, Violation
from tests.simulation.world import World

# Virtual seconds after which a run that hasn't ended counts as one that never does.
MAX_RUN_S = 600.0
# How long a catch-up from disk may take, in seconds: an engine that began to hang in the last moment before the faults
# ended has to be given up within the time to recover.
RELOAD_DEADLINE_S = 15.0
# How often a standby looks for the lease, in seconds: rarer than it does, since that is what a run does most of.
POLL_S = 0.6
# Seeds within which each planted bug has to be caught.
MAX_BUG_SEEDS = 1000
# Seeds that one process takes at a time.
CHUNK = 25


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one seed. `digest` is that of all messages and notes with their times; `tail` is the end of them."""

    seed: int
    violations: tuple[Violation, ...]
    digest: str
    tail: tuple[tuple[float, str, str], ...]
    num_messages: int
    num_tokens: int
    # How often what happened: faults that were drawn, and how ops ended.
    counts: Counter[str]

    @property
    def is_ok(self) -> bool:
        """Whether every invariant held."""
        return not self.violations


def simulate(seed: int, bug: str | None = None, *, tail_len: int | None = TAIL_LEN, has_sleeps: bool = False) -> Run:
    """Run one seed, with one bug planted if it is named (see `bugs`). `tail_len`: lines of trace to keep, None: all.

    `has_sleeps`: engines are put to sleep and woken meanwhile, too.
    """
    truth = Truth(tail_len)
    scenario = with_sleeps(draw(seed)) if has_sleeps else draw(seed)
    loop_type = StoppableLoop if scenario.stops else SimulationLoop
    ends: list[Violation] = []
    with (
        planted(bug),
        _quiet(),
        _scaled(),
        tempfile.TemporaryDirectory(prefix="rlbus-simulation-") as folder,
        asyncio.Runner(loop_factory=lambda: loop_type(MAX_RUN_S)) as runner,
    ):
        world = World(scenario, truth, Path(folder))
        try:
            runner.run(world.run())
        except RLBusError as exc:
            ends.append(Violation("I3", MAX_RUN_S, f"the run didn't end: {exc}"))
        finally:
            world.close()
        # What is cancelled with the loop is no part of the run.
        violations, digest, tail = (*truth.violations, *ends), truth.digest, tuple(truth.tail)
        num_messages, num_tokens, counts = truth.num_messages, truth.num_tokens, truth.counts.copy()
    return Run(seed, violations, digest, tail, num_messages, num_tokens, counts)


@contextlib.contextmanager
def _scaled() -> Iterator[None]:
    """Times of rlbus that aren't settings, as the simulation needs them."""
    with patch.object(catching_up, "RELOAD_DEADLINE_S", RELOAD_DEADLINE_S), patch.object(leader, "POLL_S", POLL_S):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Faults are the normal case here: what rlbus logs of them is not shown."""
    logger = logging.getLogger("rlbus")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def simulate_many(seeds: Sequence[int], num_processes: int) -> Iterator[Run]:
    """Runs of many seeds, in the order of the seeds."""
    if num_processes == 1:
        yield from map(simulate, seeds)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(simulate, seeds, chunksize=CHUNK)


def find_bugs(num_seeds: int, num_processes: int) -> dict[str, int | None]:
    """`find_bug` of every planted bug, by name."""
    if num_processes == 1:
        return {name: find_bug(name, num_seeds) for name in BUGS}
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return dict(zip(BUGS, pool.map(find_bug, BUGS, [num_seeds] * len(BUGS)), strict=True))


def find_bug(name: str, num_seeds: int) -> int | None:
    """A seed, of so many from 0 on, that catches a planted bug by its own invariant; None: none does."""
    bug = BUGS[name]
    others = (seed for seed in range(num_seeds) if seed != bug.seed)
    for seed in (bug.seed, *others):
        if any(v.invariant == bug.invariant for v in simulate(seed, name).violations):
            return seed
    return None
