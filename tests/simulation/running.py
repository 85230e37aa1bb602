"""Runs seeds: one, or many over several processes."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from rlbus.errors import RLBusError
from tests.simulation.bugs import planted
from tests.simulation.scenario import draw
from tests.simulation.truth import Violation
from tests.simulation.world import SimulationLoop, World

# Virtual seconds after which a run that hasn't ended counts as one that never does.
MAX_RUN_S = 600.0
# Seeds that one process takes at a time.
CHUNK = 25


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one seed. `digest` is that of all messages and notes with their times."""

    seed: int
    violations: tuple[Violation, ...]
    digest: str
    tail: tuple[tuple[float, str, str], ...]
    num_messages: int
    num_tokens: int

    @property
    def is_ok(self) -> bool:
        """Whether every invariant held."""
        return not self.violations


def simulate(seed: int, bug: str | None = None) -> Run:
    """Run one seed, with one bug planted if it is named (see `bugs`)."""
    world = World(draw(seed))
    truth = world.truth
    digest, violations = "", truth.violations
    with planted(bug), quiet():
        with asyncio.Runner(loop_factory=lambda: SimulationLoop(MAX_RUN_S)) as runner:
            try:
                runner.run(world.run())
            except RLBusError as exc:
                violations = [*violations, Violation("I3", MAX_RUN_S, f"the run didn't end: {exc}")]
            digest, num_violations = truth.digest, len(truth.violations)
            tail = tuple(truth.tail)
    del num_violations
    return Run(seed, tuple(violations), digest, tail, truth.num_messages, truth.num_tokens)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Faults are the normal case here: what rlbus logs of them is not shown."""
    logger = logging.getLogger("rlbus")
    before = logger.disabled, logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.disabled, logger.level = before


def simulate_many(seeds: Iterable[int], num_processes: int) -> Iterator[Run]:
    """Runs of many seeds, in the order of the seeds."""
    if num_processes == 1:
        yield from map(simulate, seeds)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(simulate, seeds, chunksize=CHUNK)
