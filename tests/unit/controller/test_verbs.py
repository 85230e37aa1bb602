"""Fleet verbs: reports, undo, and a reload with the damage rules of an update."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlbus.controller.answers import StepAnswer
from rlbus.controller.causes import fault
from rlbus.controller.verbs import new_book, to_undo
from rlbus.errors import VersionRegressionError
from rlbus.schemas import FaultCode, OpStatus, Outcome, Version, WeightsState, WorkerId
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step, failing
from rlbus.workers.testing import worker_on_bus
from tests.unit.controller.scene import PAUSED, RUNNING, Scene, Worker, code_of, outcomes, play, w, worker

pytestmark = pytest.mark.unit

OK = StepAnswer(Outcome.OK)
NO = StepAnswer(Outcome.REFUSED, fault(FaultCode.BUSY, "busy"))
BAD = StepAnswer(Outcome.FAILED, fault(FaultCode.ENGINE_FAILED, "broken"))
SILENT = StepAnswer(Outcome.UNKNOWN, fault(FaultCode.NO_ACK, "silent"))


@pytest.mark.parametrize(
    ("answers", "held", "expected"),
    [
        ([OK, BAD, OK], [], [1, 3]),
        ([OK, NO, OK], [], [1, 3]),
        ([OK, SILENT, OK], [], [1, 2, 3]),
        ([OK, BAD, OK], [3], [1]),
        ([BAD, BAD, BAD], [], []),
    ],
)
def test_an_undo_addresses_who_acked_and_who_may_be_paused(
    answers: list[StepAnswer], held: list[int], expected: list[int]
) -> None:
    """But never whom somebody else had paused before."""
    said = {w(n): answer for n, answer in enumerate(answers, start=1)}
    assert to_undo(said, [w(n) for n in held]) == tuple(w(n) for n in expected)


def test_the_first_thing_that_went_wrong_on_a_worker_stays() -> None:
    """Later phases don't write over it."""
    book = new_book([w(1), w(2)])
    book.note("pause", {w(1): OK, w(2): BAD})
    book.note("load", {w(1): SILENT, w(2): OK})
    book.undone([w(1), w(2)], "load")
    assert {k: (o.outcome, o.phase) for k, o in book.outcomes.items()} == {
        w(1): (Outcome.UNKNOWN, "load"),
        w(2): (Outcome.FAILED, "pause"),
    }
    assert [c.code for c in book.causes] == [FaultCode.ENGINE_FAILED, FaultCode.NO_ACK]


def test_an_update_that_is_open_is_not_waited_for() -> None:
    """Busy with an op ends by itself; an open update only when somebody ends it."""
    waits = fault(FaultCode.BUSY, "update u is open", op_id="u", open="u")
    assert NO.is_busy
    assert not StepAnswer(Outcome.REFUSED, waits).is_busy


def test_a_refusal_on_a_changed_worker_is_a_failure() -> None:
    """Refused means that nothing has changed, which isn't so for one that has loaded new weights."""
    book = new_book([w(1), w(2)])
    book.note("load", {w(1): OK, w(2): NO})
    book.note("flush", {w(1): NO}, is_changed=True)
    assert {k: (o.outcome, o.phase) for k, o in book.outcomes.items()} == {
        w(1): (Outcome.FAILED, "flush"),
        w(2): (Outcome.REFUSED, "load"),
    }


def rooted(number: int, root: Path, **steps: dict[int, Step]) -> Worker:
    """A worker that may read weights below `root`."""

    def start(broker: Any) -> Any:
        config = AgentConfig(weight_roots=(str(root),))
        return worker_on_bus(FakeEngine(FakeScript(steps)), broker=broker, instance_id=str(number), config=config)

    return start


def test_a_reload_gives_the_fleet_its_next_version(tmp_path: Path) -> None:
    """Pause, load, flush, resume; the version is the fleet's next step unless one is given."""
    FakeEngine.save(tmp_path / "ckpt", Version(step=1))

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.reload(str(tmp_path / "ckpt"))
        assert (report.status, report.version) == (OpStatus.OK, Version(step=1))
        assert list(report.phases_s) == ["plan", "check", "pause", "load", "flush", "resume"]
        report = await scene.fleet.client.reload(str(tmp_path / "ckpt"))
        assert report.version == Version(step=2)
        assert all(m.admitted for m in (await scene.fleet.members()).values())
        assert await scene.generations() == [RUNNING, RUNNING]
        with pytest.raises(VersionRegressionError):
            await scene.fleet.client.reload(str(tmp_path / "ckpt"), version=Version(step=2))
        for rig in scene.fleet.workers:
            calls = [c for c in rig.engine.calls if c in ("load_weights", "flush_cache", "resume")]
            assert calls == ["load_weights", "flush_cache", "resume"] * 2

    play([rooted(1, tmp_path), rooted(2, tmp_path)], scenario)


def test_a_folder_that_nobody_can_read_changes_nothing(tmp_path: Path) -> None:
    """Nobody is paused for it."""

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.reload(str(tmp_path / "nothing"), check=False)
        assert (report.status, outcomes(report)) == (OpStatus.REFUSED, {"1": "refused", "2": "refused"})
        assert not any("pause" in rig.engine.calls for rig in scene.fleet.workers)
        assert await scene.generations() == [RUNNING, RUNNING]
        assert all(m.admitted for m in (await scene.fleet.members()).values())

    play([rooted(1, tmp_path), rooted(2, tmp_path)], scenario)


def test_a_folder_that_one_worker_may_not_read_changes_nothing(tmp_path: Path) -> None:
    """Refused as a whole, also on the one that could."""
    FakeEngine.save(tmp_path / "ckpt", Version(step=1))

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.reload(str(tmp_path / "ckpt"), check=False)
        assert (report.status, outcomes(report)) == (OpStatus.REFUSED, {"1": "skipped", "2": "refused"})
        assert report.fault is not None
        assert report.fault.code is FaultCode.WRONG_STATE
        assert not any("pause" in rig.engine.calls for rig in scene.fleet.workers)

    play([rooted(1, tmp_path), rooted(2, tmp_path / "elsewhere")], scenario)


def test_a_load_that_breaks_half_way_leaves_that_worker_paused_and_dirty(tmp_path: Path) -> None:
    """The others are at the new version and run; a later reload heals it."""
    FakeEngine.save(tmp_path / "ckpt", Version(step=1))

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.reload(str(tmp_path / "ckpt"), check=False)
        assert (report.status, outcomes(report)) == (OpStatus.PARTIAL, {"1": "ok", "2": "failed"})
        assert await scene.generations() == [RUNNING, PAUSED]
        assert (await scene.fleet.members())[w(2)].status.weights.state is WeightsState.DIRTY
        assert (await scene.fleet.client.reload(str(tmp_path / "ckpt"))).status is OpStatus.OK
        assert await scene.generations() == [RUNNING, RUNNING]

    play([rooted(1, tmp_path), rooted(2, tmp_path, load_weights={1: failing(after_parts=1)})], scenario)


def test_a_reload_whose_pause_half_succeeds_loads_nothing(tmp_path: Path) -> None:
    """It is undone like any pause."""
    FakeEngine.save(tmp_path / "ckpt", Version(step=1))

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.reload(str(tmp_path / "ckpt"), check=False)
        assert outcomes(report) == {"1": "undone", "2": "failed"}
        assert await scene.generations() == [RUNNING, RUNNING]
        assert "load_weights" not in scene.fleet.workers[0].engine.calls

    play([rooted(1, tmp_path), rooted(2, tmp_path, pause={1: failing()})], scenario)


def test_a_reload_keeps_a_hold(tmp_path: Path) -> None:
    """Who was paused by a person stays so."""
    FakeEngine.save(tmp_path / "ckpt", Version(step=1))

    async def scenario(scene: Scene) -> None:
        await scene.fleet.client.pause()
        assert (await scene.fleet.client.reload(str(tmp_path / "ckpt"))).status is OpStatus.OK
        assert await scene.generations() == [PAUSED]

    play([rooted(1, tmp_path)], scenario)


def test_a_verb_names_who_failed_and_leaves_the_others_alone() -> None:
    """Flush has nothing to undo: two are ok, one isn't, and the op is partial."""

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.flush(check=False)
        assert (report.status, outcomes(report)) == (OpStatus.PARTIAL, {"1": "ok", "2": "failed"})
        assert code_of(report, 2) is FaultCode.FLUSH_FAILED
        assert report.fault is not None
        assert report.fault.detail["worker"] == "backend/2"

    play([worker(1), worker(2, {"flush_cache": {1: failing(code=FaultCode.FLUSH_FAILED)}})], scenario)


def test_an_undo_takes_a_pause_back_that_is_still_in_progress() -> None:
    """The deadline passes in the middle of a long pause: the worker is let go at once, not when the pause is over."""

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.pause(deadline_s=10.0, check=False)
        assert report.status is OpStatus.FAILED
        assert outcomes(report)["1"] == "undone"
        assert await scene.generations() == [RUNNING, RUNNING]

    play([worker(1), worker(2, {"pause": {1: Step(latency_s=300.0)}})], scenario)


def test_a_pause_that_waits_for_long_answers_is_not_a_stalled_one() -> None:
    """SCENARIOS 15: a wait of minutes shows no progress, and is healthy; only the deadline ends it."""

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.pause(mode="wait", deadline_s=600.0)
        assert report.status is OpStatus.OK
        assert report.took_s == pytest.approx(300.0)
        assert await scene.generations() == [PAUSED]

    play([worker(1, {"pause": {1: Step(latency_s=300.0)}})], scenario)


def test_a_dead_fleet_ends_every_verb_within_its_deadline() -> None:
    """Nobody answers: unknown, not a hang."""

    async def scenario(scene: Scene) -> None:
        scene.cut(1)
        began_s = asyncio.get_running_loop().time()
        report = await scene.fleet.client.resume(deadline_s=8.0, check=False)
        assert asyncio.get_running_loop().time() - began_s <= 8.0
        assert (outcomes(report), code_of(report, 1)) == ({"1": "unknown"}, FaultCode.NO_ACK)

    play([worker(1)], scenario)


def test_worker_ids_are_kept_in_reports() -> None:
    """Reports name workers as the registry does, in its order."""

    async def scenario(scene: Scene) -> None:
        report = await scene.fleet.client.versions()
        assert [o.worker for o in report.outcomes] == [WorkerId("backend/1"), WorkerId("backend/2")]

    play([worker(2), worker(1)], scenario)
