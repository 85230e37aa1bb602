"""What an engine that somebody else's trainer can feed has to do beyond the rest; run where the routes are listed.

Each test begins with a running engine without a group and leaves it so; its weights are complete, of any version. The
fake's backend is a script (tests/unit/workers/test_native.py); here it is rlbus' own, over Gloo.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from rlbus.errors import EngineError, RefusedError
from rlbus.schemas import FaultCode, Generation
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.engines.contract import A, B, CaseRunner, OpenedEngine, paused, tokens, update
from rlbus.workers.engines.native import NATIVE_ROUTES, ChecksInit, NativeEngine
from tests.engines.native_side import NativeSide
from tests.tries import TooLateError, best_of

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _only_engines_that_list_it(runner: CaseRunner) -> None:
    async def look(opened: OpenedEngine) -> None:
        routes = opened.engine.info.routes & NATIVE_ROUTES
        assert routes in (frozenset(), NATIVE_ROUTES), "all routes or none"
        if not routes or not isinstance(getattr(opened, "native", None), NativeSide):
            pytest.skip("this engine doesn't list the routes, or has a backend of its own")

    runner.run(look)


def engine_of(opened: OpenedEngine) -> NativeEngine:
    return cast(NativeEngine, opened.engine)


def side_of(opened: OpenedEngine) -> NativeSide:
    side = opened.native  # type: ignore[attr-defined]
    assert isinstance(side, NativeSide)
    return side


@asynccontextmanager
async def joined(opened: OpenedEngine) -> AsyncIterator[NativeSide]:
    """In the trainer's group inside, on an engine that stands still; running and without a group outside."""
    side, engine = side_of(opened), engine_of(opened)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.init_native(side.init_info()))
            group.create_task(side.join())
        async with paused(opened):
            yield side
            await opened.engine.flush_cache()
    finally:
        await engine.shutdown_native()
        side.leave()


async def complete(opened: OpenedEngine, side: NativeSide) -> None:
    """A whole update to B."""
    engine = engine_of(opened)
    await engine.start_native()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.update_native(side.update_info(B)))
        group.create_task(side.send(B))
    await engine.finish_native(B)


def test_a_foreign_update_gives_the_same_model_as_one_of_ours(runner: CaseRunner) -> None:
    """Token for token; twice over the same group; labelled with the version that its end names."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, B)
        expected = await tokens(opened)
        await update(opened, A)
        assert await tokens(opened) != expected
        async with joined(opened) as side:
            await complete(opened, side)
            await complete(opened, side)
        assert await tokens(opened) == expected
        assert (await opened.engine.observe()).weight_version == str(B)

    runner.run(check)


def test_a_trainer_that_never_comes_blocks_nothing(runner: CaseRunner) -> None:
    """The engine answers meanwhile, and says group_failed when the time is over."""
    limits_s = iter((2.0, 6.0, 18.0))

    async def check(opened: OpenedEngine) -> None:
        engine, side = engine_of(opened), side_of(opened)
        joining = asyncio.create_task(engine.init_native(side.init_info(timeout_s=next(limits_s))))
        assert (await opened.engine.observe()).generation is Generation.RUNNING
        await tokens(opened)
        was_over = joining.done()
        with pytest.raises(EngineError) as caught:
            await joining
        assert caught.value.code is FaultCode.GROUP_FAILED
        await engine.shutdown_native()
        side.leave()
        if was_over:
            raise TooLateError("its time was over before the engine had answered")

    best_of(lambda: runner.run(check), 3)


@pytest.mark.parametrize("wrong", ["missing", "unlike", "lengths", "field"])
def test_what_does_not_fit_is_refused_before_its_first_byte(runner: CaseRunner, wrong: str) -> None:
    """The old weights generate; the group is as good as before."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, A)
        expected = await tokens(opened)
        async with joined(opened) as side:
            info = side.update_info(B)
            match wrong:
                case "missing":
                    info = {name: info[name][:-1] for name in ("names", "dtype_names", "shapes")}
                case "unlike":
                    info["names"] = [*info["names"][:-1], "no.such.tensor"]
                case "lengths":
                    info["shapes"] = info["shapes"][:-1]
                case _:
                    info["packed"] = True
            await engine_of(opened).start_native()
            with pytest.raises(UpdateFailedError) as caught:
                await engine_of(opened).update_native(info)
            assert not caught.value.weights_touched
            await opened.engine.abort_update()
        assert await tokens(opened) == expected

    runner.run(check)


def test_a_trainer_that_dies_midway_leaves_torn_weights_and_the_next_update_heals(runner: CaseRunner) -> None:
    """SCENARIOS 5: touched, said so, and whole after the next."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, B)
        expected = await tokens(opened)
        await update(opened, A)
        async with joined(opened) as side:
            await engine_of(opened).start_native()
            receiving = asyncio.create_task(engine_of(opened).update_native(side.update_info(B)))
            await side.send(B, 8)
            with pytest.raises(UpdateFailedError) as caught:
                await receiving
            assert caught.value.weights_touched
            await opened.engine.abort_update()
            await complete(opened, side)
        assert await tokens(opened) == expected

    runner.run(check)


@pytest.mark.parametrize("wrong", ["nothing comes", "unlike", "field"])
def test_part_that_fails_after_one_that_came_leaves_torn_weights_and_the_next_update_heals(
    runner: CaseRunner, wrong: str
) -> None:
    """Untouched by itself, and the earlier bytes are in place: it says so, and so does the engine's label."""

    async def check(opened: OpenedEngine) -> None:
        engine = engine_of(opened)
        await update(opened, B)
        expected = await tokens(opened)
        await update(opened, A)
        async with joined(opened) as side:
            await engine.start_native()
            async with asyncio.TaskGroup() as group:
                group.create_task(engine.update_native(side.update_info(B)))
                group.create_task(side.send(B))
            info = side.update_info(B)
            match wrong:
                case "unlike":
                    info["names"] = [*info["names"][:-1], "no.such.tensor"]
                case "field":
                    info["packed"] = True
            receiving = asyncio.create_task(engine.update_native(info))
            if wrong == "nothing comes":
                await side.send(B, 0)
            with pytest.raises(UpdateFailedError) as caught:
                await receiving
            assert caught.value.weights_touched
            await opened.engine.abort_update()
            assert (await opened.engine.observe()).weight_version not in (str(A), str(B))
            await complete(opened, side)
        assert await tokens(opened) == expected

    runner.run(check)


def test_update_may_come_in_several_parts(runner: CaseRunner) -> None:
    """The last bytes of each tensor count, and one end names them all."""

    async def check(opened: OpenedEngine) -> None:
        engine = engine_of(opened)
        await update(opened, B)
        expected = await tokens(opened)
        async with joined(opened) as side:
            await engine.start_native()
            for version in (A, B):
                async with asyncio.TaskGroup() as group:
                    group.create_task(engine.update_native(side.update_info(version)))
                    group.create_task(side.send(version))
            await engine.finish_native(B)
        assert await tokens(opened) == expected
        assert (await opened.engine.observe()).weight_version == str(B)

    runner.run(check)


@pytest.mark.parametrize("wrong", [{"rank_offset": 0}, {"world_size": 2}, {"packed": True}, {"master_port": "1"}])
def test_a_group_that_makes_no_sense_is_refused_at_once(runner: CaseRunner, wrong: dict[str, object]) -> None:
    """No group, and nobody waits; the engine can tell without a group being left."""

    async def check(opened: OpenedEngine) -> None:
        side = side_of(opened)
        info = side.init_info() | {"rank_offset": 2, "world_size": 1 + opened.engine.info.world_size + 1} | wrong
        # Well before the group's own time is over.
        async with asyncio.timeout(30.0):
            with pytest.raises(RefusedError) as caught:
                await engine_of(opened).init_native(info)
        assert caught.value.code is FaultCode.BAD_MESSAGE
        assert isinstance(opened.engine, ChecksInit)
        with pytest.raises(RefusedError, match="init_info"):
            opened.engine.check_init(info)
        side.leave()

    runner.run(check)


def test_without_a_group_nothing_is_received(runner: CaseRunner) -> None:
    """It fails untouched, also after a shutdown."""

    async def check(opened: OpenedEngine) -> None:
        async with joined(opened) as side:
            await engine_of(opened).shutdown_native()
            await engine_of(opened).start_native()
            with pytest.raises(UpdateFailedError) as caught:
                await engine_of(opened).update_native(side.update_info(B))
            assert not caught.value.weights_touched
            await opened.engine.abort_update()

    runner.run(check)
