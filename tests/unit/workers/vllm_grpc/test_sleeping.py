"""Sleep of a server that sleeps whole, wakes in parts, and runs as soon as it is awake; in virtual time."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("grpc")

from rlbus.errors import AsleepError, EngineError, FaultError, RefusedError, refused
from rlbus.schemas import FaultCode, PauseMode, SleepTag
from rlbus.testing import run
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.engines.found import FoundAsleep
from rlbus.workers.vllm_grpc.control import Control
from rlbus.workers.vllm_grpc.engine import VllmGrpcEngine
from rlbus.workers.vllm_grpc.pausing import Pausing
from rlbus.workers.vllm_grpc.sleeping import TAGS, Sleeping
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.exchange import TORN, RankDraft
from rlbus.workers.vllm_server.updates import Updates

pytestmark = pytest.mark.unit

WEIGHTS, KV = frozenset({SleepTag.WEIGHTS}), frozenset({SleepTag.KV_CACHE})


class Server:
    """As vLLM 0.32's core does: a sleep pauses, and the last wake resumes."""

    errored = False

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.is_running = True
        self.label = "0.3"
        self.log: list[str] = []
        self.raises: dict[str, Exception] = {}
        # How long a sleep takes, which goes on whoever waits for it.
        self.sleep_s = 0.0

    async def is_paused(self, limit_s: float = 1.0) -> bool:
        return not self.is_running

    async def pause(self, mode: PauseMode, clear_cache: bool, limit_s: float | None = None) -> None:
        self.log.append(f"pause {mode.value}")
        self.is_running = False

    async def sleep(self, level: int, mode: PauseMode, limit_s: float) -> None:
        self.log.append(f"sleep {level} {mode.value}")
        if "sleep" in self.raises:
            raise self.raises["sleep"]
        await asyncio.sleep(self.sleep_s)
        self.asleep, self.is_running = {"weights", "kv_cache"}, False

    async def resume(self) -> None:
        self.log.append("resume")
        self.is_running = True

    async def wake_up(self, tags: tuple[str, ...], limit_s: float) -> None:
        self.log.append(f"wake {' '.join(tags)}")
        self.asleep -= set(tags)
        self.is_running = not self.asleep

    async def get_version(self) -> str:
        return self.label

    async def set_version(self, label: str) -> None:
        if "set_version" in self.raises:
            raise self.raises["set_version"]
        self.label = label


def of(server: Server) -> Sleeping:
    control, calls = cast(Control, server), EngineCalls(server)
    return Sleeping(control, calls, Pausing(control, calls))


def do(check: Coroutine[Any, Any, None]) -> None:
    run(check)


def test_whole_sleep_and_wake_leave_it_standing_still() -> None:
    """Only a resume lets it run, whatever the server does at the last wake."""

    async def check() -> None:
        server = Server()
        sleeping = of(server)
        data = await sleeping.sleep(TAGS, 1, PauseMode.KEEP)
        assert data.asleep == (SleepTag.KV_CACHE, SleepTag.WEIGHTS)
        data = await sleeping.wake_up(TAGS)
        assert (data.asleep, sleeping.asleep) == ((), frozenset())
        assert server.log == ["sleep 1 keep", "wake kv_cache weights", "pause keep"]
        assert not server.is_running

    do(check())


def test_partial_wake_runs_nothing_and_a_tag_that_is_awake_is_no_error() -> None:
    """And the rest still sleeps."""

    async def check() -> None:
        server = Server()
        sleeping = of(server)
        await sleeping.sleep(TAGS, 1, PauseMode.ABORT)
        await sleeping.wake_up(WEIGHTS)
        data = await sleeping.wake_up(WEIGHTS)
        assert data.asleep == (SleepTag.KV_CACHE,)
        assert server.log == ["sleep 1 abort", "wake weights"]
        assert not server.is_running

    do(check())


@pytest.mark.parametrize(("tags", "level"), [(WEIGHTS, 1), (KV, 1), (TAGS, 0), (TAGS, 3)])
def test_what_vllm_cant_do_is_refused_before_anything_happens(tags: frozenset[SleepTag], level: int) -> None:
    """A part alone, and levels that it doesn't have."""

    async def check() -> None:
        server = Server()
        with pytest.raises(RefusedError) as caught:
            await of(server).sleep(tags, level, PauseMode.ABORT)
        assert caught.value.code is FaultCode.BAD_MESSAGE
        assert server.log == []

    do(check())


def test_discarded_weights_are_never_run() -> None:
    """The server would run with the last wake; it is refused until an update has labelled the weights anew."""

    async def check() -> None:
        server = Server()
        sleeping = of(server)
        await sleeping.sleep(TAGS, 2, PauseMode.ABORT)
        with pytest.raises(FaultError) as caught:
            await sleeping.wake_up(TAGS)
        assert caught.value.code is FaultCode.WRONG_STATE
        await sleeping.wake_up(WEIGHTS)
        with pytest.raises(FaultError):
            await sleeping.wake_up(KV)
        server.label = "0.4"
        await sleeping.wake_up(KV)
        assert server.log == ["sleep 2 abort", "wake weights", "wake kv_cache", "pause keep"]

    do(check())


def test_weights_are_labelled_torn_before_they_are_discarded() -> None:
    """Whoever waits for the sleep may be gone by then: its deadline passes, or its process dies. They aren't run."""

    async def check() -> None:
        server = Server()
        server.sleep_s = 5.0
        sleeping = of(server)
        sent = asyncio.get_running_loop().create_task(sleeping.sleep(TAGS, 2, PauseMode.ABORT))
        await asyncio.sleep(1.0)
        assert server.label == TORN
        sent.cancel()
        await asyncio.wait({sent})
        with pytest.raises(FaultError) as caught:
            await sleeping.wake_up(TAGS)
        assert caught.value.code is FaultCode.WRONG_STATE
        await asyncio.sleep(10.0)
        assert (server.log, sleeping.asleep) == (["sleep 2 abort"], TAGS)

    do(check())


@pytest.mark.parametrize("level", [1, 2])
def test_refused_sleep_leaves_the_engine_awake_and_its_label_as_it_was(level: int) -> None:
    """Nothing has happened, for certain. A failed one is in doubt."""

    async def check() -> None:
        server = Server()
        server.raises = {"sleep": refused(FaultCode.WRONG_STATE, "not now")}
        sleeping = of(server)
        with pytest.raises(RefusedError):
            await sleeping.sleep(TAGS, level, PauseMode.ABORT)
        assert (sleeping.asleep, server.label) == (frozenset(), "0.3")
        server.raises = {"sleep": RuntimeError("boom")}
        with pytest.raises(EngineError):
            await sleeping.sleep(TAGS, level, PauseMode.ABORT)
        assert (sleeping.asleep, server.label) == (TAGS, TORN if level > 1 else "0.3")

    do(check())


def test_nothing_is_discarded_if_the_weights_cant_be_labelled() -> None:
    """Nobody could tell later that they are gone."""

    async def check() -> None:
        server = Server()
        server.raises = {"set_version": RuntimeError("boom")}
        sleeping = of(server)
        with pytest.raises(UpdateFailedError) as caught:
            await sleeping.sleep(TAGS, 2, PauseMode.ABORT)
        assert not caught.value.weights_touched
        assert (server.log, sleeping.asleep) == ([], frozenset())

    do(check())


def test_server_that_may_sleep_is_woken_before_it_is_resumed() -> None:
    """It was found standing still, and nothing was noted: who only stands still takes a wake as well."""

    async def check() -> None:
        for goes in ("resume", "wake"):
            server = Server()
            server.asleep, server.is_running = {"weights", "kv_cache"}, False
            engine = VllmGrpcEngine(cast(Control, server))
            engine._sleeping.is_known = False
            await (engine.resume() if goes == "resume" else engine.wake_up(TAGS))
            assert server.log[:2] == ["wake kv_cache weights", "pause keep"]
            assert server.asleep == set()

    do(check())


def test_failed_sleep_counts_as_asleep_until_it_was_woken() -> None:
    """In doubt."""

    async def check() -> None:
        server = Server()
        server.raises = {"sleep": RuntimeError("out of host memory")}
        sleeping = of(server)
        with pytest.raises(EngineError, match="out of host memory"):
            await sleeping.sleep(TAGS, 1, PauseMode.ABORT)
        assert sleeping.asleep == TAGS
        await sleeping.wake_up(TAGS)
        assert sleeping.asleep == frozenset()

    do(check())


def test_engine_that_sleeps_as_the_agent_before_noted_is_not_resumed_before_it_was_woken() -> None:
    """The server itself would step over memory that isn't there. One that is merely paused is resumed."""

    async def check() -> None:
        server = Server()
        server.is_running = False
        engine = VllmGrpcEngine(cast(Control, server))
        assert isinstance(engine, FoundAsleep)
        engine.go_on_asleep(TAGS)
        with pytest.raises(AsleepError):
            await engine.resume()
        assert server.log == []
        await engine.wake_up(TAGS)
        await engine.resume()
        assert server.log == ["wake kv_cache weights", "pause keep", "resume"]

    do(check())


def test_torn_draft_is_not_run_by_the_last_wake() -> None:
    """The target's label doesn't tell of it. What it needs to be healed is woken; a whole one may go on."""

    async def check() -> None:
        server = Server()
        engine = VllmGrpcEngine(cast(Control, server))
        engine._updates = cast(Updates, SimpleNamespace(is_unfit=True))
        engine.go_on_asleep(TAGS)
        server.asleep, server.is_running = {"weights", "kv_cache"}, False
        with pytest.raises(RefusedError, match="torn") as caught:
            await engine.wake_up(TAGS)
        assert (caught.value.code, server.log) == (FaultCode.WRONG_STATE, [])
        await engine.wake_up(WEIGHTS)
        with pytest.raises(RefusedError, match="draft"):
            await engine.wake_up(KV)
        assert not server.is_running
        engine._updates = cast(Updates, SimpleNamespace(is_unfit=False))
        assert (await engine.wake_up(KV)).asleep == ()

    do(check())


@pytest.mark.parametrize(
    ("method", "is_refused"), [("draft_model", True), ("eagle3", True), ("mtp", True), ("ngram", False), (None, False)]
)
def test_weights_of_a_draft_are_never_discarded(method: str | None, is_refused: bool) -> None:
    """Also of one that no update brings back: the last wake would generate with what is left. An n-gram has none."""

    async def check() -> None:
        server = Server()
        engine = VllmGrpcEngine(cast(Control, server))
        engine._speculates = None if method is None else RankDraft(method=method, model="d")
        if is_refused:
            with pytest.raises(RefusedError, match="level 2"):
                await engine.sleep(TAGS, 2, PauseMode.ABORT)
            assert server.log == []
            await engine.sleep(TAGS, 1, PauseMode.ABORT)
        else:
            await engine.sleep(TAGS, 2, PauseMode.ABORT)

    do(check())
