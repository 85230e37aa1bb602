"""Controllers as real processes on a real server: killed, frozen and woken, stopped; and a server without JetStream."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.codec import decode
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus, kv_there
from rlbus.controller.leader import LEASE_KEY
from rlbus.errors import BrokenError, DeadlineError, RLBusError
from rlbus.schemas import (
    Command,
    CommandRefused,
    FaultCode,
    FleetView,
    Generation,
    GetFleet,
    Lease,
    OpStatus,
    PauseGeneration,
)
from rlbus.server import EmbeddedServer
from tests.integration import commands
from tests.integration.commands import played
from tests.tries import TRIES, TooLateError

pytestmark = [pytest.mark.integration, pytest.mark.alone]

NAMESPACE = "failover"
# The promise of issue 3, in seconds.
FAILOVER_S = 5.0
# The lease alone would take 3 s.
RELEASED_S = 2.5
LIMIT_S = 90.0


class Process(commands.Process):
    """One `rlbus` process of this fleet."""

    def __init__(self, url: str, *argv: str) -> None:
        super().__init__(*argv, "--json", RLBUS_NAMESPACE=NAMESPACE, RLBUS_URL=url)

    async def there(self) -> Any:
        """Wait until it says that it is there; what it says."""
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.to_thread(self.document)

    def send(self, number: signal.Signals) -> float:
        """Send a signal; when."""
        self.popen.send_signal(number)
        return time.monotonic()


class Stage:
    """A server, two controllers, and two workers."""

    def __init__(self, server: EmbeddedServer, bus: Bus) -> None:
        self.server = server
        self.bus = bus
        self.client = FleetClient(bus, NAMESPACE, caller="test")
        self.processes: list[Process] = []

    async def start(self, *argv: str) -> tuple[Process, Any]:
        """Start one process and wait until it says that it is there."""
        process = Process(self.server.url, *argv)
        self.processes.append(process)
        return process, await process.there()

    async def leader(self) -> tuple[Process, int]:
        """Who leads at this moment, and its term: whoever stood still has lost the lease to the other."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                holder, view = await self._holder(), await self.client.status(deadline_s=LIMIT_S)
                if await self._holder() is holder:
                    return holder, view.term

    async def _holder(self) -> Process:
        kv = kv_there(self.bus, NAMESPACE)
        try:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    with contextlib.suppress(BrokenError, DeadlineError):
                        there = await kv.get(LEASE_KEY)
                        if there is not None:
                            lease: Lease = decode(there.value, Lease, LEASE_KEY)
                            pid = int(lease.name.rpartition("/")[2])
                            return next(process for process in self.processes if process.popen.pid == pid)
                    await asyncio.sleep(0.02)
        finally:
            kv.close()

    async def everybody(self) -> FleetView:
        """The fleet, once both workers are there: a new leader finds them within moments."""
        return await self.client.wait_ready(num_workers=2, deadline_s=LIMIT_S)

    async def term_above(self, term: int) -> float:
        """Until a leader of a higher term answers; when."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                # One short question after the other: the client's own patience with a silence is not what is measured.
                question = GetFleet(op_id=self.bus.new_id())
                with contextlib.suppress(RLBusError):
                    view = await self.bus.request(
                        subjects.control(NAMESPACE, "status"), question, FleetView, limit_s=0.5
                    )
                    if view.term > term:
                        return time.monotonic()
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def stage_of_two() -> AsyncIterator[tuple[Stage, Process, Process]]:
    async with (
        EmbeddedServer() as server,
        await connect_bus(BusConfig(url=server.url, connect_s=LIMIT_S), name="test") as bus,
    ):
        stage = Stage(server, bus)
        try:
            first, said = await stage.start("controller")
            assert said["role"] == "leader"
            second, _ = await stage.start("controller")
            for instance_id in ("1", "2"):
                await stage.start("worker", "fake", "--instance-id", instance_id)
            await stage.everybody()
            yield stage, first, second
        finally:
            for process in stage.processes:
                process.kill()


def has_kept(took_s: list[float], bound_s: float) -> bool:
    """Whether two of them were in time, as the first two are on a machine that goes on; or it is no use any more."""
    return sum(s < bound_s for s in took_s) == 2 or len(took_s) == 2 + TRIES


def test_a_standby_serves_in_under_5_s_after_sigkill_of_the_leader(capsys: pytest.CaptureFixture[str]) -> None:
    """Workers are known, the journal is there, and a third one takes over the same way."""

    async def main() -> list[float]:
        took_s: list[float] = []
        async with stage_of_two() as (stage, first, second):
            await stage.client.pause(op_id="p1")
            controllers = [first, second]
            while not has_kept(took_s, FAILOVER_S):
                if len(controllers) < 2:
                    controllers.append((await stage.start("controller"))[0])
                leader, term = await stage.leader()
                killed_s = leader.send(signal.SIGKILL)
                took_s.append(await stage.term_above(term) - killed_s)
                view = await stage.everybody()
                assert [m.worker for m in view.members] == ["backend/1", "backend/2"]
                controllers.remove(leader)
            assert [i.op_id for i in (await stage.client.history()).items] == ["p1"]
            assert (await stage.client.pause(op_id="p1")).status is OpStatus.OK
            assert (await stage.client.resume()).status is OpStatus.OK
        return took_s

    took_s = played(main)
    with capsys.disabled():
        print(f"\nfailover after SIGKILL, until the standby answers: {', '.join(f'{s:.2f} s' for s in took_s)}")
    assert sum(s < FAILOVER_S for s in took_s) == 2


def test_after_sigterm_the_standby_takes_over_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The lease is released."""

    async def main() -> list[float]:
        took_s: list[float] = []
        async with stage_of_two() as (stage, first, second):
            controllers = [first, second]
            while not has_kept(took_s, RELEASED_S):
                if len(controllers) < 2:
                    controllers.append((await stage.start("controller"))[0])
                leader, term = await stage.leader()
                stopped_s = leader.send(signal.SIGTERM)
                took_s.append(await stage.term_above(term) - stopped_s)
                assert await asyncio.to_thread(leader.popen.wait, LIMIT_S) == 0
                controllers.remove(leader)
        return took_s

    took_s = played(main)
    with capsys.disabled():
        print(f"\nfailover after SIGTERM, until the standby answers: {', '.join(f'{s:.2f} s' for s in took_s)}")
    assert sum(s < RELEASED_S for s in took_s) == 2


def test_a_leader_that_was_frozen_is_refused_and_becomes_the_standby() -> None:
    """SIGSTOP, and SIGCONT when another leads: that one's word counts, and the old one can follow it."""

    async def main() -> None:
        async with stage_of_two() as (stage, _, _):
            frozen, term = await stage.leader()
            frozen.send(signal.SIGSTOP)
            await stage.term_above(term)
            refused: list[CommandRefused] = []
            stage.bus.subscribe(
                f"dyn.{NAMESPACE}.backend.event.*", CommandRefused, lambda event, _: refused.append(event)
            )
            # What the old one may still have on its way when it wakes up.
            stale = Command(op_id="old", term=term, expires_at=time.time() + 60.0, body=PauseGeneration())
            stage.bus.publish(f"dyn.{NAMESPACE}.backend.rl.pause_generation", stale)
            frozen.send(signal.SIGCONT)
            async with asyncio.timeout(LIMIT_S):
                while len(refused) < 2:  # noqa: ASYNC110 - two other processes say it
                    await asyncio.sleep(0.01)
            assert {event.fault.code for event in refused} == {FaultCode.STALE_TERM}
            view = await stage.everybody()
            assert [m.status.generation for m in view.members] == [Generation.RUNNING] * 2
            # It is a standby now: when the new one dies, it leads, under a newer term.
            leader, term = await stage.leader()
            if leader is frozen:
                raise TooLateError("the other stood still, too, and this one leads again")
            leader.send(signal.SIGKILL)
            await stage.term_above(term)
            await stage.everybody()
            assert (await stage.client.pause()).status is OpStatus.OK
            assert frozen.popen.poll() is None

    played(main)


def test_the_leader_survives_a_server_that_is_stopped_and_started() -> None:
    """It leads on or again; the journal is still there, and nobody is left without a controller."""

    async def main() -> None:
        async with stage_of_two() as (stage, _, _):
            await stage.client.pause(op_id="p1")
            before = await stage.client.status()
            await stage.server.stop()
            await asyncio.sleep(6.0)
            await stage.server.start()
            await stage.term_above(before.term)
            assert [i.op_id for i in (await stage.client.history()).items] == ["p1"]
            await stage.everybody()
            assert (await stage.client.resume()).status is OpStatus.OK

    played(main)


def test_single_is_refused_beside_a_leader_and_its_term_is_outgrown_by_the_next() -> None:
    """Two that lead would contradict each other. Alone it leads, and who leads by a lease after it goes above it."""

    async def main() -> None:
        async with stage_of_two() as (stage, first, second):
            single, said = await stage.start("controller", "--single")
            if "role" in said:
                raise TooLateError("whoever led stood still, and its lease had ended")
            assert await asyncio.to_thread(single.popen.wait, LIMIT_S) == 2
            assert "leads there by a lease" in single.kill()
            for process in (first, second):
                process.popen.terminate()
                await asyncio.to_thread(process.popen.wait, LIMIT_S)
            single, said = await stage.start("controller", "--single")
            assert said["role"] == "leader"
            await stage.everybody()
            await stage.client.pause()
            before = await stage.client.status()
            single.kill()
            await stage.start("controller")
            await stage.term_above(before.term)
            await stage.everybody()
            assert (await stage.client.resume()).status is OpStatus.OK

    played(main)


def test_without_jetstream_it_says_what_to_do_and_single_runs_without() -> None:
    """One clear line and 2; with --single it leads, and has no history."""

    async def main() -> None:
        async with EmbeddedServer(jetstream=False) as server:
            process = Process(server.url, "controller")
            code = await asyncio.to_thread(process.popen.wait, LIMIT_S)
            stderr = process.kill()
            assert code == 2
            lines = [line for line in stderr.splitlines() if line.startswith("rlbus: ")]
            assert len(lines) == 1
            assert "nats-server -js" in lines[0]
            assert "--single" in lines[0]
            single = Process(server.url, "controller", "--single")
            try:
                assert (await single.there())["role"] == "leader"
                history = Process(server.url, "history")
                code = await asyncio.to_thread(history.popen.wait, LIMIT_S)
                assert "--single" in history.kill()
                assert code == 3
            finally:
                single.kill()

    played(main)
