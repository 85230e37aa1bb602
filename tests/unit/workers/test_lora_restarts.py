"""Adapters over restarts of an agent whose engine goes on, and doesn't say from which files it has them (Dynamo)."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rlbus.schemas import (
    CommandBody,
    FaultCode,
    GetLoras,
    LoadLora,
    LoraDraining,
    LoraLoaded,
    LorasData,
    LoraState,
    LoraUnloaded,
    Result,
    ResultStatus,
    UnloadLora,
)
from rlbus.testing import run
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.found import Found
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.ledger import KEEP_S, Ledger
from rlbus.workers.lora_testing import config_for, fake_adapter, load_of
from rlbus.workers.testing import COMPONENT, INSTANCE_ID, NAMESPACE, Rig, code_of, worker_on_bus
from tests.unit.workers.lora_stage import data_of

pytestmark = pytest.mark.unit

Life = Callable[[Rig], Coroutine[Any, Any, None]]
# The bus of each agent counts its ids from the beginning.
_numbers = itertools.count(1)


class Outliving(FakeEngine):
    """As Dynamo: it outlives its agents, and lists names alone."""

    found = Found(None, is_paused=False, is_torn=False)

    def __init__(self) -> None:
        super().__init__(loras=LoraInfo(8, can_drain=False))
        self.loras.tells_files = False


def lives(
    root: Path, *agents: Life, engine: Outliving | None = None, away_s: float = 0.0, **settings: Any
) -> Outliving:
    """One agent after the other beside the same engine, each with what the one before has left `away_s` ago."""
    used = Outliving() if engine is None else engine

    async def main() -> None:
        for life in agents:
            with Ledger.open(root / "state", NAMESPACE, COMPONENT, INSTANCE_ID) or pytest.fail("no ledger") as ledger:
                async with worker_on_bus(used, ledger=ledger, config=config_for(root, **settings)) as rig:
                    await life(rig)
            for path in (root / "state").rglob("*.jsonl"):
                os.utime(path, (time.time() - away_s,) * 2)

    run(main())
    return used


def publish(root: Path, revision: int, size: int = 1000) -> LoadLora:
    """The load of a revision with bytes of its own."""
    return load_of(fake_adapter(root / str(revision), f"{revision}" * size), revision)


def new_op_id() -> str:
    """One that no agent has had."""
    return f"sent-{next(_numbers)}"


async def ok(rig: Rig, *bodies: CommandBody) -> None:
    """Each of them goes well."""
    for body in bodies:
        assert (await rig.send(body, op_id=new_op_id())).status is ResultStatus.OK


async def sums(rig: Rig) -> dict[int | None, str | None]:
    """The checksum of each revision, as its worker knows it."""
    data: LorasData = data_of(await rig.send(GetLoras(), op_id=new_op_id()))
    return {view.revision: view.checksum for view in data.loras}


def copies(root: Path) -> set[str]:
    """The checksums of the copies that are there."""
    return {path.name for path in (root / "cache").glob("*/*")}


@pytest.mark.parametrize("away_s", [0.0, 2 * KEEP_S])
def test_copies_that_an_engine_still_reads_stay_when_a_restarted_agent_makes_room(
    tmp_path: Path, away_s: float
) -> None:
    """By what the agent before has noted, however long ago: the engine doesn't say where it reads."""
    first, second, third = (publish(tmp_path, revision) for revision in (1, 2, 3))

    async def before(rig: Rig) -> None:
        await ok(rig, first, second, UnloadLora(name="policy", revision=2))

    async def after(rig: Rig) -> None:
        await ok(rig, third)

    engine = lives(tmp_path, before, after, away_s=away_s, lora_cache_bytes=2500)
    assert set(engine.loras.sums) == {("policy", 1), ("policy", 3)}
    assert copies(tmp_path) == {first.checksum, third.checksum}


def test_bytes_of_an_adapter_are_known_after_any_number_of_restarts(tmp_path: Path) -> None:
    """The same load is done already each time, and other bytes are refused."""
    first, second = publish(tmp_path, 1), publish(tmp_path, 2)
    other = load_of(fake_adapter(tmp_path / "other", "other"), 1)

    async def before(rig: Rig) -> None:
        await ok(rig, first)

    async def between(rig: Rig) -> None:
        assert await sums(rig) == {1: first.checksum}
        await ok(rig, second)

    async def after(rig: Rig) -> None:
        assert await sums(rig) == {1: first.checksum, 2: second.checksum}

    async def last(rig: Rig) -> None:
        refused: Result = await rig.send(other, op_id=new_op_id())
        assert code_of(refused) is FaultCode.REVISION_TAKEN
        await ok(rig, first, second)

    engine = lives(tmp_path, before, between, after, after, last)
    assert engine.calls.count("load_lora") == 2


@pytest.mark.parametrize("who", ["the agent", "somebody else"])
def test_what_was_unloaded_is_remembered_by_no_later_agent(tmp_path: Path, who: str) -> None:
    """Whoever has put another one there since, nothing of before proves its bytes."""
    first, second = publish(tmp_path, 1), publish(tmp_path, 2)

    async def before(rig: Rig) -> None:
        await ok(rig, first, second)

    async def between(rig: Rig) -> None:
        if who == "the agent":
            await ok(rig, UnloadLora(name="policy", revision=1))
        else:
            rig.engine.loras.unload("policy", 1)
        assert await sums(rig) == {2: second.checksum}

    async def after(rig: Rig) -> None:
        rig.engine.loras.sums["policy", 1] = "unknown"
        assert await sums(rig) == {1: None, 2: second.checksum}

    lives(tmp_path, before, between, after)


@pytest.mark.parametrize("checksum", ["a" * 64, "unknown"])
@pytest.mark.parametrize("way", ["its request ends", "its time is over"])
def test_what_an_agent_before_has_loaded_goes_at_the_end_of_its_drain_too(
    tmp_path: Path, way: str, checksum: str
) -> None:
    """Nobody else would end it; whether its bytes are known or not."""
    engine = FakeEngine(loras=LoraInfo(4))
    engine.loras.sums["policy", 7] = checksum

    async def main() -> None:
        async with worker_on_bus(engine, config=config_for(tmp_path)) as rig:
            engine.submit("r", (1, 2, 3), 10_000, model="policy@7")
            drained = data_of(await rig.send(UnloadLora(name="policy", revision=7, drain_s=30.0), op_id="u"))
            assert [view.state for view in drained.loras] == [LoraState.DRAINING]
            await asyncio.sleep(10.0)
            assert ("policy", 7) in engine.loras.sums
            if way == "its request ends":
                await engine.abort(["r"])
            await asyncio.sleep(5.0 if way == "its request ends" else 25.0)
            assert engine.loras.sums == {}
            told = [type(event) for event in rig.events if isinstance(event, LoraLoaded | LoraDraining | LoraUnloaded)]
            assert told == [LoraDraining, LoraUnloaded]

    run(main())
