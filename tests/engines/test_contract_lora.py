"""What every engine that takes adapters has to do with them: the same checks on fake, torch and vLLM.

Each test begins and ends with a running engine without adapters; its weights are complete, of any version.
"""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rlbus.errors import FaultError
from rlbus.schemas import FaultCode
from rlbus.workers.engines.contract import A, B, CaseRunner, OpenedEngine, paused, tokens, update
from rlbus.workers.engines.contract_lora import (
    NAME,
    OpenedLoraEngine,
    listed,
    loaded,
    loras,
    newest,
    takes_loras,
    tokens_as,
)
from tests.tries import TooLateError, best_of

pytestmark = pytest.mark.engine

LONG_PROMPT = tuple(range(10, 60))


def on_loras(runner: CaseRunner, check: Callable[[OpenedLoraEngine], Coroutine[Any, Any, None]]) -> None:
    """Run a check if the engine takes adapters."""

    async def wrapped(opened: OpenedEngine) -> None:
        able = takes_loras(opened)
        if able is not None:
            await check(able)
            assert await listed(opened) == {}

    runner.run(wrapped)


def test_adapter_is_listed_and_changes_what_its_name_generates(runner: CaseRunner, tmp_path: Path) -> None:
    """By "name@revision" and by name; the base model is as before, and so it is after the unload."""

    async def check(opened: OpenedLoraEngine) -> None:
        base = await tokens(opened)
        async with loaded(opened, tmp_path, 7):
            (resident,) = (await listed(opened)).values()
            assert (resident.name, resident.revision, resident.is_draining) == (NAME, 7, False)
            assert resident.num_in_flight in (0, None)
            adapted = await tokens_as(opened, f"{NAME}@7")
            assert adapted == await tokens_as(opened, newest(opened, 7)) != base
            assert await tokens(opened) == base
        assert await tokens(opened) == base
        for name in (NAME, f"{NAME}@7"):
            with pytest.raises(LookupError):
                await tokens_as(opened, name)

    on_loras(runner, check)


def test_no_revision_is_served_the_cache_of_another(runner: CaseRunner, tmp_path: Path) -> None:
    """SCENARIOS 31: a prompt that the base model and each revision have cached, asked for again in any order."""

    async def check(opened: OpenedLoraEngine) -> None:
        base = await tokens(opened, prompt=LONG_PROMPT)
        alone: list[tuple[int, ...]] = []
        for revision in (1, 2):
            await opened.engine.flush_cache()
            async with loaded(opened, tmp_path / "alone", revision):
                alone.append(await tokens_as(opened, newest(opened, revision), LONG_PROMPT))
        assert len({base, *alone}) == 3
        async with loaded(opened, tmp_path, 1, 2):
            for _ in range(2):
                assert await tokens_as(opened, f"{NAME}@2", LONG_PROMPT) == alone[1]
                assert await tokens(opened, prompt=LONG_PROMPT) == base
                assert await tokens_as(opened, f"{NAME}@1", LONG_PROMPT) == alone[0]
                assert await tokens_as(opened, newest(opened, 2), LONG_PROMPT) == alone[1]

    on_loras(runner, check)


def test_requests_of_several_adapters_at_once_get_what_they_get_alone(runner: CaseRunner, tmp_path: Path) -> None:
    """In one batch, or one after the other, as the engine likes."""

    async def check(opened: OpenedLoraEngine) -> None:
        async with loaded(opened, tmp_path, 1, 2):
            expected = [
                await tokens(opened),
                await tokens_as(opened, f"{NAME}@1"),
                await tokens_as(opened, f"{NAME}@2"),
            ]
            found = await asyncio.gather(tokens(opened), tokens_as(opened, f"{NAME}@1"), tokens_as(opened, f"{NAME}@2"))
            assert list(found) == expected

    on_loras(runner, check)


def test_loading_again_changes_nothing(runner: CaseRunner, tmp_path: Path) -> None:
    """The same name@revision from the same files."""

    async def check(opened: OpenedLoraEngine) -> None:
        async with loaded(opened, tmp_path, 1):
            expected = await tokens_as(opened, f"{NAME}@1")
            await loras(opened).load_lora(NAME, 1, tmp_path / "1")
            assert len(await listed(opened)) == 1
            assert await tokens_as(opened, f"{NAME}@1") == expected

    on_loras(runner, check)


def test_draining_adapter_takes_no_request_and_finishes_those_it_has(runner: CaseRunner, tmp_path: Path) -> None:
    """SCENARIOS 32: counted while they run; the plain name means an older revision then; a load takes it back."""

    folders = (tmp_path / str(number) for number in count())

    async def check(opened: OpenedLoraEngine) -> None:
        folder = next(folders)
        engine = loras(opened)
        if not engine.lora_info.can_drain:
            return
        async with loaded(opened, folder, 1, 2):
            older = await tokens_as(opened, f"{NAME}@1")
            begun = asyncio.Event()
            call = opened.generate_as(f"{NAME}@2", (5, 6, 7), runner.case.long_tokens, "drains", begun.set)
            running = asyncio.ensure_future(call)
            await begun.wait()
            await engine.drain_lora(NAME, 2)
            resident = (await listed(opened))[f"{NAME}@2"]
            assert resident.is_draining
            with pytest.raises(LookupError):
                await tokens_as(opened, f"{NAME}@2")
            assert await tokens_as(opened, NAME) == older
            assert (await running).finish == "length"
            assert (await listed(opened))[f"{NAME}@2"].num_in_flight == 0
            await engine.load_lora(NAME, 2, folder / "2")
            assert await tokens_as(opened, NAME) == await tokens_as(opened, f"{NAME}@2") != older
        if resident.num_in_flight == 0:
            raise TooLateError("it had ended by itself")
        assert resident.num_in_flight == 1

    best_of(lambda: on_loras(runner, check))


def test_unload_ends_the_requests_that_name_it_and_no_other(runner: CaseRunner, tmp_path: Path) -> None:
    """As an abort, and never goes on as the base model; unloading what isn't there is fine."""

    folders = (tmp_path / str(number) for number in count())

    async def check(opened: OpenedLoraEngine) -> None:
        folder = next(folders)
        engine, long = loras(opened), runner.case.long_tokens
        if not engine.lora_info.ends_requests:
            return
        async with loaded(opened, folder, 1, 2):
            begun = [asyncio.Event(), asyncio.Event()]
            running = [
                asyncio.ensure_future(opened.generate_as(f"{NAME}@{n}", (5, 6, 7), long, f"ends-{n}", begun[n - 1].set))
                for n in (1, 2)
            ]
            for event in begun:
                await event.wait()
            num_ended = await engine.unload_lora(NAME, 1)
            first, was_done = await running[0], running[1].done()
            assert set(await listed(opened)) == {f"{NAME}@2"}
            assert await engine.unload_lora(NAME, 1) in (0, None)
            await opened.engine.abort(("ends-2",))
            if "length" in (first.finish, (await running[1]).finish):
                raise TooLateError("they had ended by themselves")
            assert first.finish == "abort"
            assert num_ended in (1, None)
            assert not was_done

    best_of(lambda: on_loras(runner, check))


def test_unload_that_ends_no_request_waits_for_it_and_lets_no_new_one_in(runner: CaseRunner, tmp_path: Path) -> None:
    """Where an engine can't end them: those that run are whole, and none begins with other weights."""

    folders = (tmp_path / str(number) for number in count())

    async def check(opened: OpenedLoraEngine) -> None:
        folder = next(folders)
        engine, long = loras(opened), runner.case.long_tokens
        if engine.lora_info.ends_requests:
            return
        async with loaded(opened, folder, 1, 2):
            begun = asyncio.Event()
            running = asyncio.ensure_future(opened.generate_as(f"{NAME}@1", (5, 6, 7), long, "whole", begun.set))
            await begun.wait()
            unloading = asyncio.ensure_future(engine.unload_lora(NAME, 1))
            assert await tokens_as(opened, f"{NAME}@2")
            was_done, had_unloaded = running.done(), unloading.done()
            with pytest.raises(LookupError):
                await tokens_as(opened, f"{NAME}@1")
            done = await running
            assert (len(done.tokens), done.finish) == (long, "length")
            num_waited = await unloading
            assert set(await listed(opened)) == {f"{NAME}@2"}
            assert await engine.unload_lora(NAME, 1) in (0, None)
        if was_done or had_unloaded:  # its end may not be read yet
            raise TooLateError("it had ended by itself")
        assert num_waited in (1, None)

    best_of(lambda: on_loras(runner, check))


@pytest.mark.parametrize("what", ["missing", "truncated", "other config"])
def test_files_that_are_no_adapter_change_nothing(runner: CaseRunner, tmp_path: Path, what: str) -> None:
    """Refused; the engine lives, and what was loaded stays."""

    async def check(opened: OpenedLoraEngine) -> None:
        if runner.case.name == "fake" and what != "missing":
            return  # it reads no tensors
        async with loaded(opened, tmp_path, 1):
            expected = await tokens_as(opened, f"{NAME}@1")
            bad = await opened.save_adapter(tmp_path / "bad", 2)
            if what == "missing":
                (bad / "adapter_model.safetensors").unlink()
            if what == "truncated":
                data = (bad / "adapter_model.safetensors").read_bytes()
                (bad / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
            if what == "other config":
                text = (bad / "adapter_config.json").read_text()
                (bad / "adapter_config.json").write_text(text.replace('"r": 4', '"r": 8'))
            with pytest.raises(FaultError) as caught:
                await loras(opened).load_lora(NAME, 2, bad)
            assert caught.value.code is FaultCode.MANIFEST_MISMATCH
            assert set(await listed(opened)) == {f"{NAME}@1"}
            assert await tokens_as(opened, f"{NAME}@1") == expected

    on_loras(runner, check)


def test_full_engine_refuses_and_keeps_what_it_has(runner: CaseRunner, tmp_path: Path) -> None:
    """SCENARIOS 35: nobody is dropped in silence."""

    async def check(opened: OpenedLoraEngine) -> None:
        capacity = loras(opened).lora_info.capacity
        async with loaded(opened, tmp_path, *range(1, capacity + 1)):
            one_more = await opened.save_adapter(tmp_path / "more", 99)
            with pytest.raises(FaultError) as caught:
                await loras(opened).load_lora(NAME, 99, one_more)
            assert caught.value.code is FaultCode.NO_CAPACITY
            assert len(await listed(opened)) == capacity
            await loras(opened).unload_lora(NAME, 1)
            await loras(opened).load_lora(NAME, 99, one_more)
            assert f"{NAME}@99" in await listed(opened)

    on_loras(runner, check)


def test_adapters_stay_over_an_update_of_the_base_weights(runner: CaseRunner, tmp_path: Path) -> None:
    """Over a group and from disk: still listed, and what they generate is what a fresh load gives on those weights."""

    async def check(opened: OpenedLoraEngine) -> None:
        await update(opened, A)
        async with loaded(opened, tmp_path / "adapters", 1):
            first = await tokens_as(opened, newest(opened, 1))
            await update(opened, B)
            assert set(await listed(opened)) == {f"{NAME}@1"}
            second = await tokens_as(opened, newest(opened, 1))
            assert second != first
            await opened.save(tmp_path / "weights", A)
            async with paused(opened):
                await opened.engine.load_weights(str(tmp_path / "weights"), A)
                await opened.engine.flush_cache()
            assert set(await listed(opened)) == {f"{NAME}@1"}
            assert await tokens_as(opened, newest(opened, 1)) == first

    on_loras(runner, check)


def test_hot_swap_takes_the_place_of_the_older_revision(runner: CaseRunner, tmp_path: Path) -> None:
    """SCENARIOS 31: only where the caches are keyed by revision; then nothing of the older one is served any more."""

    async def check(opened: OpenedLoraEngine) -> None:
        if not loras(opened).lora_info.can_hot_swap:
            return
        async with loaded(opened, tmp_path / "alone", 2):
            expected = await tokens_as(opened, NAME, LONG_PROMPT)
        async with loaded(opened, tmp_path, 1):
            await tokens_as(opened, NAME, LONG_PROMPT)
            files = await opened.save_adapter(tmp_path / "2", 2)
            await loras(opened).load_lora(NAME, 2, files, replaces=1)
            assert set(await listed(opened)) == {f"{NAME}@2"}
            assert await tokens_as(opened, NAME, LONG_PROMPT) == expected
            with pytest.raises(LookupError):
                await tokens_as(opened, f"{NAME}@1")

    on_loras(runner, check)
