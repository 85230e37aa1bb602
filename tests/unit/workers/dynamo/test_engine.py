"""The adapter on a stand-in for Dynamo's HTTP: what it advertises, how it reads answers, pauses, flushes and dies."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlbus.errors import EngineDeadError, EngineError, FaultError
from rlbus.schemas import FaultCode, Generation, PauseMode
from rlbus.workers.dynamo.engine import DynamoEngine
from rlbus.workers.dynamo.listing import Listed
from rlbus.workers.dynamo.surface import ROUTES, Began
from rlbus.workers.engines.base import NO_LABEL
from rlbus.workers.engines.found import Found
from rlbus.workers.engines.native import NATIVE_ROUTES
from rlbus.workers.vllm_server.exchange import TORN, RankDraft
from tests.unit.workers.dynamo.fake_dynamo import FakeWorker, listed, on_engine

pytestmark = pytest.mark.unit

# What needs rlbus's backend in the ranks.
OVER_A_GROUP = frozenset({"update_weights_from_distributed", "get_weight_checksums", *NATIVE_ROUTES})
ALL = OVER_A_GROUP | {
    "pause_generation",
    "resume_generation",
    "flush_cache",
    "abort_request",
    "update_weights_from_disk",
    "set_weight_version",
}


def info_of(worker: FakeWorker, tmp_path: Path, who: Listed | None = None, **options: Any) -> Any:
    """What the engine says that it is."""
    found: list[Any] = []

    async def check(engine: DynamoEngine) -> None:
        found.append(engine.info)

    on_engine(worker, tmp_path, check, who, **options)
    return found[0]


# --- what is advertised


def test_a_worker_with_our_transfer_backend_takes_every_update(tmp_path: Path) -> None:
    """It is asked by a question that only that backend answers, through a folder that both see."""
    info = info_of(FakeWorker(), tmp_path)
    assert (info.engine, info.model, info.world_size, info.backends) == ("dynamo", "model", 1, ("gloo",))
    assert info.routes == ALL


def test_a_worker_without_it_takes_updates_from_disk_only(tmp_path: Path) -> None:
    """What vLLM says to the question is no reason to leave the worker out."""
    info = info_of(FakeWorker(has_transfer=False), tmp_path)
    assert info.routes == ALL - OVER_A_GROUP
    assert info.backends == ()


def test_ranks_that_do_not_see_our_folder_take_no_update_over_a_group(tmp_path: Path) -> None:
    """Dynamo says "ok", since it can't know; only the answers in the folder count."""
    assert "update_weights_from_distributed" not in info_of(FakeWorker(world_size=0), tmp_path).routes


def test_several_ranks_are_asked_only_if_the_user_says_so(tmp_path: Path) -> None:
    """A question that its vLLM doesn't understand would leave its ranks out of step."""
    two = listed(world_size=2)
    worker = FakeWorker(world_size=2)
    assert "update_weights_from_distributed" not in info_of(worker, tmp_path, two).routes
    assert "init_weights_update_group" not in worker.routes
    assert info_of(worker, tmp_path, two, has_transfer=True).routes == ALL
    assert "get_weight_checksums" not in info_of(FakeWorker(), tmp_path, has_transfer=False).routes


def test_a_backend_that_the_user_promised_and_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """One rank of two answers."""
    with pytest.raises(EngineError, match="1 of 2 ranks answer"):
        info_of(FakeWorker(world_size=1), tmp_path, listed(world_size=2), has_transfer=True)


@pytest.mark.parametrize(
    ("lacks", "gone"),
    [
        ("abort_request", {"abort_request"}),
        ("update_weights_from_disk", {"update_weights_from_disk"}),
        ("init_weights_update_group", OVER_A_GROUP),
        ("update_weights_from_distributed", OVER_A_GROUP),
        ("set_weight_version", {"set_weight_version", "update_weights_from_disk", *OVER_A_GROUP}),
        ("liveness_probe", set()),
    ],
)
def test_a_route_that_dynamo_does_not_list_is_not_advertised(lacks: str, gone: set[str], tmp_path: Path) -> None:
    """Nor what would need it."""
    who = listed(routes=frozenset(ROUTES) - {lacks})
    assert info_of(FakeWorker(), tmp_path, who).routes == ALL - gone


def test_without_pausing_nothing_else_is_advertised(tmp_path: Path) -> None:
    """Weights can't be changed under a running engine."""
    who = listed(routes=frozenset({"abort_request", "update_weights_from_disk", "liveness_probe"}))
    assert info_of(FakeWorker(), tmp_path, who).routes == frozenset()


def test_a_model_whose_tensors_are_not_known_takes_no_updates(tmp_path: Path) -> None:
    """No update of it could be checked."""
    empty = tmp_path / "empty"
    empty.mkdir()
    info = info_of(FakeWorker(), tmp_path, model_dir=empty)
    assert info.routes == {
        "pause_generation",
        "resume_generation",
        "flush_cache",
        "abort_request",
        "set_weight_version",
    }


def test_how_the_worker_was_found_is_told(tmp_path: Path) -> None:
    """An earlier sidecar left it paused, labelled, in the middle of an update: the session is closed."""
    worker = FakeWorker(is_paused=True, label="0.3", is_open=True, is_torn=True)
    found: list[Found] = []

    async def check(engine: DynamoEngine) -> None:
        found.append(engine.found)

    on_engine(worker, tmp_path, check)
    assert found == [Found("torn", is_paused=True, is_torn=True)]
    assert not worker.is_open


@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.parametrize("has_transfer", [True, False])
def test_worker_whose_label_says_torn_is_found_torn_whatever_its_ranks_say(
    tmp_path: Path, has_transfer: bool, is_paused: bool
) -> None:
    """A reload from disk that was cut off has no ranks that know of it: only the label tells."""
    worker = FakeWorker(is_paused=is_paused, label=TORN, has_transfer=has_transfer)
    found: list[Found] = []

    async def check(engine: DynamoEngine) -> None:
        found.append(engine.found)

    on_engine(worker, tmp_path, check)
    assert found == [Found(TORN, is_paused=is_paused, is_torn=True)]


def test_torn_draft_is_told_though_no_update_of_drafts_goes_through_dynamo(tmp_path: Path) -> None:
    """Its ranks say so: nothing may be generated with it."""
    draft = RankDraft(method="draft_model", model="d", label=TORN)
    found: list[Found] = []

    async def check(engine: DynamoEngine) -> None:
        found.append(engine.found)

    on_engine(FakeWorker(label="0.3", draft=draft), tmp_path, check)
    assert found == [Found("0.3", is_paused=False, is_torn=False, is_draft_torn=True)]


# --- what it says of itself


def test_it_says_what_dynamo_says_and_not_what_was_commanded(tmp_path: Path) -> None:
    """SCENARIOS 39: somebody pauses it behind our back, somebody else resumes it."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        observed = await engine.observe()
        assert (observed.generation, observed.weight_version) == (Generation.RUNNING, NO_LABEL)
        worker.is_paused, worker.label = True, "7"
        observed = await engine.observe()
        assert (observed.generation, observed.weight_version) == (Generation.PAUSED, "7")
        await engine.pause(PauseMode.KEEP, True)
        worker.is_paused = False
        assert (await engine.observe()).generation is Generation.RUNNING

    on_engine(worker, tmp_path, check)


def test_where_dynamo_can_not_tell_it_says_what_was_commanded(tmp_path: Path) -> None:
    """And before anything was, that nobody knows."""

    async def check(engine: DynamoEngine) -> None:
        assert (await engine.observe()).generation is Generation.UNKNOWN
        await engine.pause(PauseMode.ABORT, True)
        assert (await engine.observe()).generation is Generation.PAUSED
        await engine.resume()
        assert (await engine.observe()).generation is Generation.RUNNING

    on_engine(FakeWorker(), tmp_path, check, listed(routes=frozenset(ROUTES) - {"update_weights_from_disk"}))


def test_a_route_that_is_not_listed_is_not_called_either(tmp_path: Path) -> None:
    """Another engine of Dynamo's has fewer; how it is can still be told."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        assert (await engine.observe()).generation is Generation.UNKNOWN
        assert worker.calls == []

    on_engine(worker, tmp_path, check, listed(routes=frozenset({"pause_generation", "resume_generation"})))


def test_observing_does_not_wait_for_a_pause_that_waits(tmp_path: Path) -> None:
    """Dynamo's flag is behind the lock that the pause holds."""
    worker = FakeWorker(held={"pause_generation": asyncio.Event()})

    async def check(engine: DynamoEngine) -> None:
        pausing = asyncio.ensure_future(engine.pause(PauseMode.WAIT, True))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(1.0):
            assert (await engine.observe()).generation is Generation.UNKNOWN
            await engine.abort(("cmpl-abc",))
            with pytest.raises(FaultError, match="abort by id"):
                await engine.abort(None)
        worker.held["pause_generation"].set()
        await pausing
        assert (await engine.observe()).generation is Generation.PAUSED

    on_engine(worker, tmp_path, check)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ((200, b'{"status":"error","alive":false,"message":"no engine"}'), "no engine"),
        ((200, b'{"status":"error"}'), "no reason given"),
        ((200, b'{"message":"fine"}'), "without a status"),
        ((200, b"[]"), "without a status"),
        ((200, b'{"status":7}'), "without a status"),
        ((200, b"<html>"), "isn't JSON"),
        ((200, b"1" * (17 << 20)), "more than"),
        ((404, b'{"error":"Route not found","message":"x"}'), "404"),
        ((500, b'{"error":"Internal","message":"boom"}'), "500"),
        ((413, b"Failed to buffer the request body: length limit exceeded"), "length limit"),
        ((401, b""), "credentials"),
    ],
)
def test_every_way_to_fail_is_an_error_that_says_so(broken: tuple[int, bytes], words: str, tmp_path: Path) -> None:
    """200 among them; the worker lives on."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        worker.broken["liveness_probe"] = worker.broken["pause_generation"] = broken
        for call in (engine.observe(), engine.pause(PauseMode.KEEP, True)):
            with pytest.raises(EngineError, match=words) as caught:
                await call
            assert not isinstance(caught.value, EngineDeadError)
        assert engine.death is None
        worker.broken.clear()
        await engine.pause(PauseMode.KEEP, True)

    on_engine(worker, tmp_path, check)


def test_a_refused_connection_is_death(tmp_path: Path) -> None:
    """Nothing more is asked of it."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        worker.began_s = None
        with pytest.raises(EngineDeadError, match="nobody listens"):
            await engine.pause(PauseMode.KEEP, True)
        for call in (engine.observe(), engine.check_alive(1.0), engine.pause(PauseMode.KEEP, True)):
            with pytest.raises(EngineDeadError):
                await call

    on_engine(worker, tmp_path, check)


def test_another_process_in_its_place_is_death_and_a_late_answer_is_not(tmp_path: Path) -> None:
    """SCENARIOS 8: it answers as healthily as the old one, with other weights. Its uptime tells."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        await asyncio.sleep(100.0)
        await engine.check_alive(1.0)
        worker.late_s = 3.0
        await engine.check_alive(5.0)
        worker.late_s = 0.0
        worker.began_s = asyncio.get_running_loop().time()
        with pytest.raises(EngineDeadError, match="was restarted"):
            await engine.observe()

    on_engine(worker, tmp_path, check)


def test_a_process_that_was_given_up_is_not_taken_again(tmp_path: Path) -> None:
    """Its successor is."""
    with pytest.raises(EngineError, match="restart it"):
        info_of_outlived(FakeWorker(began_s=0.0), tmp_path)
    info_of_outlived(FakeWorker(began_s=-50.0 + 60.0), tmp_path)


def info_of_outlived(worker: FakeWorker, tmp_path: Path) -> None:
    """Start after a process that began at about 0 s was given up."""

    async def check(engine: DynamoEngine) -> None:
        assert engine.info.engine == "dynamo"

    on_engine(worker, tmp_path, check, outlived=Began(-0.1, 0.1))


# --- what it does


@pytest.mark.parametrize("mode", list(PauseMode))
def test_every_mode_is_said_as_it_is_and_nothing_is_counted(mode: PauseMode, tmp_path: Path) -> None:
    """SCENARIOS 13, 49: with the flag for the caches, which Dynamo would otherwise choose."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        data = await engine.pause(mode, False)
        assert (data.num_aborted, data.num_held) == (None, None)
        assert ("pause_generation", {"mode": mode.value, "clear_cache": False}) in worker.calls

    on_engine(worker, tmp_path, check)


def test_a_flush_empties_caches_by_a_pause_and_leaves_it_running_or_paused_as_it_was(tmp_path: Path) -> None:
    """Dynamo's own flush is never used: it says "ok" whatever came of it."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        await engine.flush_cache()
        assert not worker.is_paused
        await engine.pause(PauseMode.ABORT, False)
        await engine.flush_cache()
        assert worker.is_paused
        assert "flush_cache" not in worker.routes
        assert worker.calls.count(("pause_generation", {"mode": "keep", "clear_cache": True})) == 2

    on_engine(worker, tmp_path, check)


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_cache_that_stays_full_fails_the_flush(is_paused: bool, tmp_path: Path) -> None:
    """SCENARIOS 14: and a running engine runs on."""
    worker = FakeWorker(flush_fails=True, is_paused=is_paused)

    async def check(engine: DynamoEngine) -> None:
        with pytest.raises(FaultError) as caught:
            await engine.flush_cache()
        assert caught.value.code is FaultCode.FLUSH_FAILED
        assert worker.is_paused is is_paused

    on_engine(worker, tmp_path, check)


def test_a_flush_that_is_cancelled_leaves_a_running_engine_running(tmp_path: Path) -> None:
    """Dynamo goes on with the pause; the resume comes behind it."""
    worker = FakeWorker(held={"pause_generation": asyncio.Event()})

    async def check(engine: DynamoEngine) -> None:
        flushing = asyncio.ensure_future(engine.flush_cache())
        await asyncio.sleep(1.0)
        flushing.cancel()
        asyncio.get_running_loop().call_later(1.0, worker.held["pause_generation"].set)
        with pytest.raises(asyncio.CancelledError):
            await flushing
        assert not worker.is_paused

    on_engine(worker, tmp_path, check)


def test_requests_are_aborted_by_the_ids_that_clients_see(tmp_path: Path) -> None:
    """With or without what the OpenAI routes put before them; all of them by a pause."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        await engine.abort(("cmpl-one", "chatcmpl-two", "three"))
        aborted = {body["request_id"] for route, body in worker.calls if route == "abort_request"}
        assert aborted == {"one", "two", "three"}
        await engine.abort(None)
        assert ("pause_generation", {"mode": "abort", "clear_cache": False}) in worker.calls
        assert not worker.is_paused

    on_engine(worker, tmp_path, check)


def test_an_abort_that_failed_is_told_after_the_others_were_tried(tmp_path: Path) -> None:
    """None is left out because of another."""
    worker = FakeWorker(broken={"abort_request": (200, b'{"status":"error","message":"abort failed: x"}')})

    async def check(engine: DynamoEngine) -> None:
        with pytest.raises(EngineError, match="abort failed"):
            await engine.abort(("one", "two"))
        assert worker.routes.count("abort_request") == 2

    on_engine(worker, tmp_path, check)


def test_somebody_else_who_resumes_during_a_pause_is_noticed(tmp_path: Path) -> None:
    """The pause isn't said to stand."""
    worker = FakeWorker()

    async def check(engine: DynamoEngine) -> None:
        worker.broken["update_weights_from_disk"] = (200, b'{"status":"error","message":"Worker must be paused"}')
        with pytest.raises(EngineError, match="resumed by somebody else"):
            await engine.pause(PauseMode.KEEP, True)

    on_engine(worker, tmp_path, check)
