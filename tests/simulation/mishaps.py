"""What goes wrong at a moment of a simulated run, and how it is mended."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from tests.simulation.leading import ControllerProcess
from tests.simulation.parties import Process, TracedBroker, TrainerProcess, WorkerProcess
from tests.simulation.scenario import MAX_LAG_S, Mishap
from tests.simulation.truth import Truth


class Fleet(Protocol):
    """What a mishap needs of the world."""

    truth: Truth
    workers: list[WorkerProcess]
    broker: TracedBroker
    is_calm: bool
    lag_s: float

    @property
    def leader(self) -> ControllerProcess | None:
        """Who leads, as far as it believes itself."""

    @property
    def trainer(self) -> TrainerProcess:
        """Who trains now."""

    def processes(self) -> list[Process]:
        """All that were not replaced."""

    async def restart_worker(self, number: int, after_s: float, *, is_asked: bool = False) -> None:
        """Its next boot comes after a while."""

    def start_controller(self) -> None:
        """One more."""

    def start_trainer(self) -> None:
        """The next one, in the place of the one that trains now."""


async def happen(fleet: Fleet, mishap: Mishap) -> None:
    """It happens, and is over when this returns."""
    await asyncio.sleep(mishap.at_s)
    if fleet.is_calm:
        return
    fleet.truth.note("mishap", f"{mishap.kind} {mishap.whom} for {mishap.for_s:.3f} s")
    running = [p for p in fleet.processes() if p.is_running]
    victim = running[mishap.whom % len(running)]
    match mishap.kind:
        case "partition":
            await _partition(fleet, victim, mishap.for_s)
        case "lag":
            await _lag(fleet, victim, mishap.for_s)
        case "disconnect":
            await _cut(fleet, [victim], mishap.for_s)
        case "blackout":
            await _cut(fleet, running, mishap.for_s)
        case "stop":
            await _stop(victim, mishap.for_s)
        case "worker-crash" | "worker-restart":
            number = mishap.whom % len(fleet.workers)
            await fleet.restart_worker(number, mishap.for_s, is_asked=mishap.kind == "worker-restart")
        case "trainer-crash":
            await fleet.trainer.crash()
            await asyncio.sleep(mishap.for_s * (mishap.whom % 2))
            fleet.start_trainer()
        case "trainer-zombie":
            zombie = fleet.trainer
            fleet.start_trainer()
            await asyncio.sleep(mishap.for_s)
            await zombie.crash()
        case "store-blackout":
            await _cut_store(fleet, [p for p in running if isinstance(p, ControllerProcess)], mishap.for_s)
        case _:
            if fleet.leader is not None:
                await _befall(fleet, fleet.leader, mishap)
                fleet.truth.count(f"fault {mishap.kind}")
            return
    fleet.truth.count(f"fault {mishap.kind}")


async def _befall(fleet: Fleet, leader: ControllerProcess, mishap: Mishap) -> None:
    """What happens to whoever leads. A standby, if there is one, takes over."""
    match mishap.kind:
        case "controller-crash":
            await leader.crash()
            await asyncio.sleep(mishap.for_s)
            fleet.start_controller()
        case "controller-restart":
            await leader.stop()
            fleet.start_controller()
        case "controller-stop":
            await _stop(leader, mishap.for_s)
        case "controller-cut":
            # From everything; it comes back with its ops in progress, and knows nothing of a successor.
            fleet.broker.partition(leader.store)
            await _partition(fleet, leader, mishap.for_s)
            fleet.broker.heal(leader.store)
        case "controller-lag":
            # It dies while what it said is still on the way: some of that arrives after its successor has spoken.
            fleet.lag_s = MAX_LAG_S
            leader.lag((0.0, MAX_LAG_S))
            await asyncio.sleep(mishap.for_s)
            await leader.crash()
            fleet.start_controller()
        case "store-cut":
            await _cut_store(fleet, [leader], mishap.for_s)


async def _partition(fleet: Fleet, victim: Process, for_s: float) -> None:
    fleet.broker.partition(victim.transport)
    await asyncio.sleep(for_s)
    fleet.broker.heal(victim.transport)


async def _lag(fleet: Fleet, victim: Process, for_s: float) -> None:
    fleet.lag_s = MAX_LAG_S
    victim.lag((0.0, MAX_LAG_S))
    await asyncio.sleep(for_s)
    if not fleet.is_calm:
        victim.unlag()


async def _stop(victim: Process, for_s: float) -> None:
    victim.gate.close()
    await asyncio.sleep(for_s)
    victim.gate.open()


async def _cut(fleet: Fleet, victims: Sequence[Process], for_s: float) -> None:
    for victim in victims:
        fleet.broker.disconnect(victim.transport)
    await asyncio.sleep(for_s)
    for victim in victims:
        if victim.is_running:
            fleet.broker.reconnect(victim.transport)


async def _cut_store(fleet: Fleet, victims: Sequence[ControllerProcess], for_s: float) -> None:
    for victim in victims:
        fleet.broker.partition(victim.store)
    await asyncio.sleep(for_s)
    for victim in victims:
        fleet.broker.heal(victim.store)
