"""What every engine has to do, whatever it is: the same checks on fake, torch and vLLM (see `rlbus.workers.engines`).

Each test begins with a running engine without a group and leaves it so; weights are whatever the test before left,
complete.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from rlbus.errors import EngineError, ManifestError
from rlbus.schemas import FaultCode, Generation, PauseMode, ReceivedData, TensorSpec, TensorSum, Version
from rlbus.transfer.manifest import num_bytes
from rlbus.workers.engines.base import ReceiveOrder, UpdateFailedError
from rlbus.workers.engines.contract import CaseRunner, Generated, OpenedEngine

pytestmark = pytest.mark.engine

A, B = Version(step=1), Version(step=2)
PROMPT = (5, 6, 7, 8)
BUCKET_BYTES = 1 << 16
_epochs = itertools.count(1)
_requests = itertools.count(1)


@dataclass
class Stream:
    """A request in flight."""

    request_id: str
    task: "asyncio.Task[Generated]"
    num_tokens: int = 0

    def on_token(self) -> None:
        """Count."""
        self.num_tokens += 1


async def begin(opened: OpenedEngine, num_tokens: int) -> Stream:
    """A request that has its first token."""
    first = asyncio.Event()
    request_id = f"request-{next(_requests)}"
    stream = Stream(request_id, asyncio.ensure_future(asyncio.sleep(0, Generated((), ""))))

    def on_token() -> None:
        stream.on_token()
        first.set()

    stream.task = asyncio.ensure_future(opened.generate(PROMPT, num_tokens, request_id, on_token))
    await first.wait()
    return stream


async def tokens(opened: OpenedEngine, num_tokens: int = 12, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """What the engine generates now."""
    generated = await opened.generate(prompt, num_tokens, f"request-{next(_requests)}")
    assert generated.finish == "length"
    return generated.tokens


@asynccontextmanager
async def paused(opened: OpenedEngine, mode: PauseMode = PauseMode.ABORT) -> AsyncIterator[None]:
    """Paused inside, running outside."""
    await opened.engine.pause(mode, True)
    try:
        yield
    finally:
        await opened.engine.resume()


@asynccontextmanager
async def grouped(opened: OpenedEngine) -> AsyncIterator[int]:
    """Joined inside; yields the epoch."""
    plan = await opened.plan(next(_epochs))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(opened.join_sender(plan))
            joined = await opened.engine.join_group(plan, plan.spans[0])
        span = plan.spans[0]
        assert joined.epoch == plan.epoch
        assert joined.ranks == tuple(range(span.first, span.first + span.num_ranks))
        assert joined.world_size == plan.world_size
        yield plan.epoch
    finally:
        await opened.engine.leave_group()
        await opened.leave_sender()


def order(opened: OpenedEngine, epoch: int, version: Version) -> ReceiveOrder:
    """The transfer of `version`."""
    return ReceiveOrder(f"update-{epoch}", epoch, version, opened.tensors(), BUCKET_BYTES)


async def transfer(
    opened: OpenedEngine, epoch: int, version: Version, num_tensors: int | None = None
) -> tuple[ReceivedData, tuple[TensorSum, ...], list[int]]:
    """Send and receive; the received data, the sent sums, and the progress."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    progress: list[int] = []
    what = order(opened, epoch, version)
    receiving = asyncio.ensure_future(
        opened.engine.receive_weights(
            what, lambda: void(loop.call_soon_threadsafe(ready.set)), lambda done, _: progress.append(done)
        )
    )
    waiting = asyncio.ensure_future(ready.wait())
    await asyncio.wait({receiving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not ready.is_set():
        await receiving
    sent = await opened.send(what, num_tensors)
    return await receiving, sent, progress


def void(_: object) -> None:
    """Make a statement of a value."""


async def update(opened: OpenedEngine, version: Version) -> None:
    """A whole update to `version`, flushed, running afterwards."""
    async with paused(opened):
        async with grouped(opened) as epoch:
            received, sent, _ = await transfer(opened, epoch, version)
            assert received.sums == sent
            await opened.engine.finish_update(version)
        await opened.engine.flush_cache()


def test_it_says_what_it_is(runner: CaseRunner) -> None:
    """Routes, ranks and backends are there after start, and it runs."""

    async def check(opened: OpenedEngine) -> None:
        info = opened.engine.info
        assert {"pause_generation", "resume_generation", "flush_cache", "abort_request"} <= info.routes
        assert "update_weights_from_distributed" in info.routes
        plan = await opened.plan(1)
        assert info.world_size == plan.spans[0].num_ranks
        assert plan.backend in info.backends
        assert (await opened.engine.observe()).generation is Generation.RUNNING

    runner.run(check)


def test_keep_freezes_requests_and_resume_continues_them(runner: CaseRunner) -> None:
    """No token while paused; afterwards the same tokens as without a pause."""

    async def check(opened: OpenedEngine) -> None:
        whole = await tokens(opened, runner.case.long_tokens)
        stream = await begin(opened, runner.case.long_tokens)
        await opened.engine.pause(PauseMode.KEEP, True)
        assert (await opened.engine.observe()).generation is Generation.PAUSED
        await asyncio.sleep(0)
        before = stream.num_tokens
        await asyncio.sleep(runner.case.settle_s)
        # What had been generated may still be on its way to its reader when the pause returns; then nothing comes.
        settled = stream.num_tokens
        await asyncio.sleep(runner.case.settle_s)
        assert stream.num_tokens == settled
        assert settled - before <= 3
        assert not stream.task.done()
        await opened.engine.resume()
        assert await stream.task == Generated(whole, "length")

    runner.run(check)


def test_wait_lets_requests_finish_first(runner: CaseRunner) -> None:
    """The pause returns when the last one has ended by itself."""

    async def check(opened: OpenedEngine) -> None:
        stream = await begin(opened, runner.case.long_tokens)
        async with paused(opened, PauseMode.WAIT):
            assert (await stream.task).finish == "length"
            assert (await opened.engine.observe()).generation is Generation.PAUSED

    runner.run(check)


def test_abort_ends_requests_with_what_they_have(runner: CaseRunner) -> None:
    """They end as aborted, with the tokens so far, and are counted if the engine can."""

    async def check(opened: OpenedEngine) -> None:
        stream = await begin(opened, runner.case.long_tokens)
        data = await opened.engine.pause(PauseMode.ABORT, True)
        ended = await stream.task
        await opened.engine.resume()
        assert ended.finish == "abort"
        assert 0 < len(ended.tokens) < runner.case.long_tokens
        assert data.num_aborted == (1 if runner.case.counts_requests else data.num_aborted)

    runner.run(check)


def test_pause_and_resume_are_idempotent(runner: CaseRunner) -> None:
    """In every mode, and an abort on top of a keep ends what was held."""

    async def check(opened: OpenedEngine) -> None:
        await opened.engine.resume()
        stream = await begin(opened, runner.case.long_tokens)
        await opened.engine.pause(PauseMode.KEEP, True)
        await opened.engine.pause(PauseMode.KEEP, True)
        assert not stream.task.done()
        await opened.engine.pause(PauseMode.ABORT, True)
        assert (await stream.task).finish == "abort"
        await opened.engine.pause(PauseMode.WAIT, True)
        assert (await opened.engine.observe()).generation is Generation.PAUSED
        await opened.engine.resume()
        await opened.engine.resume()
        assert (await opened.engine.observe()).generation is Generation.RUNNING
        assert len(await tokens(opened)) == 12

    runner.run(check)


def test_request_that_comes_during_a_pause_runs_after_it(runner: CaseRunner) -> None:
    """It is taken, makes no token, and isn't lost."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        async with paused(opened):
            late = asyncio.ensure_future(tokens(opened))
            await asyncio.sleep(runner.case.settle_s)
            assert not late.done()
        assert await late == expected

    runner.run(check)


def test_flush_leaves_a_paused_and_a_running_engine_able_to_generate(runner: CaseRunner) -> None:
    """Caches change the speed, never the tokens."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        async with paused(opened):
            await opened.engine.flush_cache()
        assert await tokens(opened) == expected
        await opened.engine.flush_cache()
        assert await tokens(opened) == expected

    runner.run(check)


def test_abort_ends_the_named_requests_only(runner: CaseRunner) -> None:
    """Unknown ids are not an error and not counted; None means all."""

    async def check(opened: OpenedEngine) -> None:
        one = await begin(opened, runner.case.long_tokens)
        two = await begin(opened, runner.case.long_tokens)
        assert await opened.engine.abort((one.request_id, "nobody")) == 1
        assert (await one.task).finish == "abort"
        assert not two.task.done()
        assert await opened.engine.abort(None) == 1
        assert (await two.task).finish == "abort"
        assert await opened.engine.abort(None) == 0

    runner.run(check)


def test_abort_and_observe_work_beside_a_waiting_pause(runner: CaseRunner) -> None:
    """Aborting what it waits for lets the pause return."""

    async def check(opened: OpenedEngine) -> None:
        stream = await begin(opened, 10 * runner.case.long_tokens)
        pausing = asyncio.ensure_future(opened.engine.pause(PauseMode.WAIT, True))
        await asyncio.sleep(0)
        async with asyncio.timeout(2.0):
            await opened.engine.observe()
        await opened.engine.abort((stream.request_id,))
        await pausing
        assert (await stream.task).finish == "abort"
        await opened.engine.resume()

    runner.run(check)


@pytest.mark.parametrize("reason", ["missing", "unexpected", "shape", "dtype"])
def test_manifest_check_names_the_first_bad_tensor(runner: CaseRunner, reason: str) -> None:
    """And changes nothing."""

    async def check(opened: OpenedEngine) -> None:
        good = list(opened.tensors())
        opened.engine.check_manifest(good)
        last = good[-1]
        match reason:
            case "missing":
                bad, name = good[:-1], last.name
            case "unexpected":
                name = "no.such.tensor"
                bad = [*good, TensorSpec(name=name, dtype=last.dtype, shape=last.shape)]
            case "shape":
                shape = (*last.shape[:-1], last.shape[-1] + 1)
                bad, name = [*good[:-1], msgspec.structs.replace(last, shape=shape)], last.name
            case _:
                bad, name = [*good[:-1], msgspec.structs.replace(last, dtype="complex128")], last.name
        with pytest.raises(ManifestError) as caught:
            opened.engine.check_manifest(bad)
        assert caught.value.code is FaultCode.MANIFEST_MISMATCH
        assert caught.value.tensor == name
        assert caught.value.fault.detail["reason"] == reason

    runner.run(check)


def test_join_with_the_wrong_number_of_ranks_fails_without_a_group(runner: CaseRunner) -> None:
    """Before anybody waits for the others; what is received then fails untouched."""

    async def check(opened: OpenedEngine) -> None:
        plan = await opened.plan(next(_epochs))
        span = msgspec.structs.replace(plan.spans[0], num_ranks=plan.spans[0].num_ranks + 1)
        with pytest.raises(EngineError) as caught:
            await opened.engine.join_group(plan, span)
        assert caught.value.code is FaultCode.GROUP_FAILED
        await fails_untouched(opened, plan.epoch)

    runner.run(check)


async def fails_untouched(opened: OpenedEngine, epoch: int) -> None:
    """A transfer without a group fails before its first byte, and leaves the engine as it was."""
    expected = await tokens(opened)
    async with paused(opened):
        with pytest.raises(UpdateFailedError) as caught:
            await opened.engine.receive_weights(order(opened, epoch, B), lambda: None, lambda done, total: None)
        assert not caught.value.weights_touched
        await opened.engine.abort_update()
        await opened.engine.flush_cache()
    assert await tokens(opened) == expected


def test_receive_without_a_group_fails_untouched(runner: CaseRunner) -> None:
    """Also after a group was left; leaving twice is fine."""

    async def check(opened: OpenedEngine) -> None:
        async with grouped(opened) as epoch:
            pass
        await opened.engine.leave_group()
        await fails_untouched(opened, epoch)

    runner.run(check)


def test_update_changes_what_is_generated_and_the_same_version_gives_the_same(runner: CaseRunner) -> None:
    """Received sums are the sent ones, in order; the count is right; the label is the version."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, A)
        first = await tokens(opened)
        async with paused(opened):
            async with grouped(opened) as epoch:
                received, sent, progress = await transfer(opened, epoch, B)
                total = sum(num_bytes(spec) for spec in opened.tensors())
                assert received.sums == sent
                assert [s.name for s in sent] == [spec.name for spec in opened.tensors()]
                assert (received.num_bytes, received.num_tensors) == (total, len(sent))
                assert progress == sorted(progress)
                assert progress[-1] == total
                await opened.engine.finish_update(B)
            await opened.engine.flush_cache()
        second = await tokens(opened)
        assert second != first
        label = (await opened.engine.observe()).weight_version
        assert label in (None, str(B))
        await update(opened, A)
        assert await tokens(opened) == first

    runner.run(check)


def test_group_is_good_for_several_updates(runner: CaseRunner) -> None:
    """It is formed once, and each transfer is a session of its own."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, A)
        first = await tokens(opened)
        async with paused(opened):
            async with grouped(opened) as epoch:
                for version in (B, A):
                    received, sent, _ = await transfer(opened, epoch, version)
                    assert received.sums == sent
                    await opened.engine.finish_update(version)
            await opened.engine.flush_cache()
        assert await tokens(opened) == first

    runner.run(check)


def test_prefix_of_older_weights_is_not_served_after_an_update(runner: CaseRunner) -> None:
    """A prompt that was cached before gives the tokens that it gives without a cache."""

    async def check(opened: OpenedEngine) -> None:
        prompt = tuple(range(10, 60))
        await update(opened, A)
        old = await tokens(opened, prompt=prompt)
        assert await tokens(opened, prompt=prompt) == old
        await update(opened, B)
        new = await tokens(opened, prompt=prompt)
        await opened.engine.flush_cache()
        assert await tokens(opened, prompt=prompt) == new
        assert new != old

    runner.run(check)


def test_sender_that_dies_half_way_tears_and_a_full_update_heals(runner: CaseRunner) -> None:
    """The failure admits that the weights were touched; the session is closed; nothing has to be restarted."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, B)
        expected = await tokens(opened)
        await update(opened, A)
        async with paused(opened):
            async with grouped(opened) as epoch:
                with pytest.raises(UpdateFailedError) as caught:
                    await transfer(opened, epoch, B, len(opened.tensors()) // 2)
                assert caught.value.weights_touched
                await opened.engine.abort_update()
                await opened.engine.abort_update()
            async with grouped(opened) as epoch:
                received, sent, _ = await transfer(opened, epoch, B)
                assert received.sums == sent
                await opened.engine.finish_update(B)
            await opened.engine.flush_cache()
        assert await tokens(opened) == expected

    runner.run(check)


def test_leaving_the_group_lets_a_stuck_receive_go_untouched(runner: CaseRunner) -> None:
    """A sender that never begins; meanwhile the engine says how it is."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        async with paused(opened):
            async with grouped(opened) as epoch:
                receiving = asyncio.ensure_future(
                    opened.engine.receive_weights(
                        order(opened, epoch, B),
                        lambda: void(loop.call_soon_threadsafe(ready.set)),
                        lambda done, total: None,
                    )
                )
                await ready.wait()
                async with asyncio.timeout(2.0):
                    assert (await opened.engine.observe()).generation is Generation.PAUSED
                await opened.engine.leave_group()
                with pytest.raises(UpdateFailedError) as caught:
                    async with asyncio.timeout(10.0):
                        await receiving
                assert not caught.value.weights_touched
                await opened.engine.abort_update()
            await opened.engine.flush_cache()
        assert await tokens(opened) == expected

    runner.run(check)


def test_cancelled_receive_can_be_aborted_and_healed(runner: CaseRunner) -> None:
    """Whatever the cancel left, the next group and a full update work."""

    async def check(opened: OpenedEngine) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        async with paused(opened), grouped(opened) as epoch:
            receiving = asyncio.ensure_future(
                opened.engine.receive_weights(
                    order(opened, epoch, B),
                    lambda: void(loop.call_soon_threadsafe(ready.set)),
                    lambda done, total: None,
                )
            )
            await ready.wait()
            receiving.cancel()
            with suppress(asyncio.CancelledError, UpdateFailedError):
                async with asyncio.timeout(10.0):
                    await receiving
            await opened.engine.abort_update()
        await update(opened, A)
        first = await tokens(opened)
        await update(opened, B)
        assert await tokens(opened) != first

    runner.run(check)


def test_weights_from_disk_equal_those_from_the_group(runner: CaseRunner, tmp_path: Path) -> None:
    """The same version gives the same tokens by either way."""

    async def check(opened: OpenedEngine) -> None:
        await update(opened, A)
        expected = await tokens(opened)
        await update(opened, B)
        await opened.save(tmp_path / "a", A)
        async with paused(opened):
            await opened.engine.load_weights(str(tmp_path / "a"), A)
            await opened.engine.flush_cache()
        assert await tokens(opened) == expected
        assert (await opened.engine.observe()).weight_version in (None, str(A))

    runner.run(check)


def test_missing_folder_leaves_the_weights_untouched(runner: CaseRunner, tmp_path: Path) -> None:
    """A typing error in a path costs nothing."""

    async def check(opened: OpenedEngine) -> None:
        expected = await tokens(opened)
        async with paused(opened):
            with pytest.raises(UpdateFailedError) as caught:
                await opened.engine.load_weights(str(tmp_path / "nothing-here"), B)
            assert not caught.value.weights_touched
            await opened.engine.abort_update()
        assert await tokens(opened) == expected

    runner.run(check)


def test_checksums_follow_the_weights(runner: CaseRunner) -> None:
    """Equal for equal versions, different for different ones."""

    async def check(opened: OpenedEngine) -> None:
        if "get_weight_checksums" not in opened.engine.info.routes:
            return
        await update(opened, A)
        first = await opened.engine.checksums()
        await update(opened, B)
        second = await opened.engine.checksums()
        await update(opened, A)
        assert await opened.engine.checksums() == first
        assert [s.name for s in first.sums] == [s.name for s in second.sums]
        assert first.sums != second.sums

    runner.run(check)
