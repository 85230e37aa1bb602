"""Adapters in a fleet in which some engines take none."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rlbus.controller.frontend import Frontend
from rlbus.errors import RefusedError
from rlbus.schemas import Fault, FaultCode, Generation, LoadLora, OpStatus, PauseGeneration, ResumeGeneration, Target
from rlbus.workers.engines.fake import ROUTES
from rlbus.workers.engines.fake_script import failing
from tests.unit.controller import failover_stage
from tests.unit.controller.lora_stage import adapter, listed, on_fleet, serving, taker
from tests.unit.controller.scene import Scene, Worker, code_of, outcomes, w, worker

pytestmark = pytest.mark.unit

PLAIN = ROUTES - {"load_lora", "unload_lora", "list_loras"}


def plain(number: int) -> Worker:
    """A worker whose engine takes no adapters."""
    return worker(number, routes=PLAIN)


def test_in_a_fleet_where_some_take_no_adapters_who_can_is_addressed_and_listed(tmp_path: Path) -> None:
    """A load for all is refused with nobody touched; a list is of those that take any, and of nobody else."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        with pytest.raises(RefusedError, match=r"backend/2 \(fake\) doesn't .*: backend/1; or .*--where-possible"):
            await client.load_lora("policy", folder)
        assert await scene.generations() == [Generation.RUNNING] * 2
        await client.load_lora("policy", folder, target=Target(workers=(w(1),)))
        assert listed(await client.loras()) == {"1": ["policy@1"]}
        with pytest.raises(RefusedError, match="doesn't serve list_loras"):
            await client.loras(Target(workers=(w(2),)))

    on_fleet([taker(1), plain(2)], scenario)


def test_where_possible_means_those_whose_engine_takes_adapters_and_says_who_is_left_out(tmp_path: Path) -> None:
    """One outcome per worker; only those who load are paused; nobody lacks it then, and it can go again."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        client = scene.fleet.client
        report = await client.load_lora("policy", folder, where_possible=True)
        assert (report.status, report.fault) == (OpStatus.OK, None)
        assert outcomes(report) == {"1": "ok", "2": "skipped", "3": "ok"}
        assert code_of(report, 2) is FaultCode.NO_ROUTE
        assert report.outcomes[-1].fault is not None
        assert report.outcomes[-1].fault.message == "fake takes no adapters here (it doesn't serve load_lora)"
        assert await scene.addressed(PauseGeneration) == ["1", "3"]
        assert serving(scene) == [["policy@1"], [], ["policy@1"]]
        await asyncio.sleep(120.0)
        view = await client.status()
        assert [(one.name, one.target) for one in view.loras] == [("policy", Target())]
        assert [m.loras_behind for m in view.members] == [()] * 3
        assert await scene.addressed(LoadLora) == ["1", "3"], "nobody is given what it can't take, later either"
        assert outcomes(await client.unload_lora("policy")) == {"1": "ok", "3": "ok"}
        assert (await client.status()).loras == ()

    on_fleet([taker(1), plain(2), taker(3)], scenario)


def test_where_possible_changes_nothing_among_those_who_can(tmp_path: Path) -> None:
    """All of them have it or nobody, and the report isn't ok because somebody was left out."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.load_lora("policy", folder, where_possible=True, check=False)
        assert outcomes(report) == {"1": "undone", "2": "failed", "3": "skipped"}
        assert report.status is OpStatus.FAILED
        assert serving(scene) == [[], [], []]
        assert await scene.generations() == [Generation.RUNNING] * 3

    on_fleet([taker(1), taker(2, {"load_lora": {0: failing()}}), plain(3)], scenario)


def test_where_it_is_possible_nowhere_it_is_refused(tmp_path: Path) -> None:
    """Ok on nobody would be no answer."""
    folder = adapter(tmp_path / "a")

    async def scenario(scene: Scene) -> None:
        with pytest.raises(RefusedError, match=r"backend/1 \(fake\), backend/2 \(fake\) don't serve load_lora"):
            await scene.fleet.client.load_lora("policy", folder, where_possible=True)

    on_fleet([plain(1), plain(2)], scenario)


def test_where_possible_still_waits_for_the_frontend(tmp_path: Path) -> None:
    """It has to show the adapter, since somebody has it; else the load is taken back."""
    folder = adapter(tmp_path / "a")

    class Blind(Frontend):
        async def until_shown(self, model: str, until_s: float, is_stopped: Callable[[], bool]) -> Fault | None:
            return Fault(code=FaultCode.WRONG_STATE, message=f"it doesn't show {model}")

    async def scenario(scene: Scene) -> None:
        scene.fleet.controller._loras._loras._frontend = Blind("http://127.0.0.1:1")
        report = await scene.fleet.client.load_lora("policy", folder, where_possible=True, check=False)
        assert outcomes(report) == {"1": "undone", "2": "skipped"}
        assert report.fault is not None
        assert report.fault.message == "it doesn't show policy@1"
        assert serving(scene) == [[], []]

    on_fleet([taker(1), plain(2)], scenario)


def test_the_next_controller_finishes_a_load_where_possible_and_knows_it_afterwards(tmp_path: Path) -> None:
    """It says who was left out, too; and the one after it still has the adapter among those of the fleet."""
    folder = adapter(tmp_path / "a")

    async def scenario(stage: failover_stage.Stage) -> None:
        def look(command: object) -> None:
            if isinstance(getattr(command, "body", None), ResumeGeneration) and not stage.processes[0].is_killed:
                asyncio.get_running_loop().call_later(0.0, stage.kill, stage.processes[0])

        stage.on_command = look
        report = await stage.client.load_lora("policy", folder, where_possible=True)
        assert outcomes(report) == {"1": "ok", "2": "skipped"}
        assert [one.revision for one in (await stage.client.status()).loras] == [1]
        assert await stage.generations() == [Generation.RUNNING] * 2

    failover_stage.play([taker(1), plain(2)], scenario)
