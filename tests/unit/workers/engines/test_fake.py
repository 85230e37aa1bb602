"""The fake engine does what its script says, and notices what a real engine would suffer in silence."""

import asyncio
from pathlib import Path

import pytest

from rlbus.errors import EngineDeadError, EngineError, ManifestError
from rlbus.schemas import FaultCode, GroupPlan, PauseMode, RankSpan, Rendezvous, Version
from rlbus.testing import run
from rlbus.transfer.fake import fake_sum
from rlbus.workers.engines.base import ReceiveOrder, UpdateFailedError
from rlbus.workers.engines.fake import DEFAULT_TENSORS, INITIAL, FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step, failing

pytestmark = pytest.mark.unit

V1 = Version(step=1)
ORDER = ReceiveOrder("u", 1, V1, DEFAULT_TENSORS, 1024)
SPAN = RankSpan(component="c", instance_id="1", first=1, num_ranks=1)
PLAN = GroupPlan(
    epoch=1,
    group_id="g",
    backend="fake",
    num_trainer_ranks=1,
    world_size=2,
    spans=(SPAN,),
    rendezvous=Rendezvous(host="h", port=1, prefix="p"),
    bucket_bytes=1024,
)


def nothing(*_: object) -> None:
    """Neither ready nor progress matter."""


async def joined(steps: dict[str, dict[int, Step]] | None = None) -> FakeEngine:
    """Started, paused and in a group."""
    engine = FakeEngine(FakeScript(steps or {}))
    await engine.start()
    await engine.pause(PauseMode.KEEP, True)
    await engine.join_group(PLAN, SPAN)
    return engine


@pytest.mark.parametrize(("after_parts", "num_new", "is_touched"), [(0, 0, False), (1, 1, True), (4, 4, True)])
def test_scripted_failure_comes_after_so_many_parts(after_parts: int, num_new: int, is_touched: bool) -> None:
    """Before the first byte nothing is touched; afterwards the tensors that came are new."""

    async def main() -> None:
        engine = await joined({"receive_weights": {1: failing(after_parts=after_parts)}})
        with pytest.raises(UpdateFailedError) as caught:
            await engine.receive_weights(ORDER, nothing, nothing)
        assert caught.value.weights_touched is is_touched
        assert list(engine.held.values()).count(V1) == num_new
        assert engine.is_torn is (0 < num_new < 4)

    run(main())


def test_wrong_checksum_and_a_skipped_transfer_look_like_success() -> None:
    """As the faults of real engines that only a comparison finds."""

    async def main() -> None:
        engine = await joined({"receive_weights": {1: Step(wrong_sum_of="layers.0.weight"), 2: Step(skips=True)}})
        first = await engine.receive_weights(ORDER, nothing, nothing)
        sums = {s.name: s.checksum for s in first.sums}
        wrong = [s.name for s in DEFAULT_TENSORS if sums[s.name] != fake_sum(s.name, V1, s.shape)]
        assert wrong == ["layers.0.weight"]
        await engine.abort_update()
        second = await engine.receive_weights(ORDER, nothing, nothing)
        assert (second.num_bytes, second.sums) == (0, ())

    run(main())


def test_step_over_half_written_weights_is_noticed() -> None:
    """An agent that updates a running engine breaks the contract, and the test that does it fails."""

    async def main() -> None:
        engine = await joined({"receive_weights": {1: Step(transfer_s=1.0)}})
        await engine.resume()
        engine.submit("r", (1,), 1000)
        await asyncio.sleep(0.1)
        await engine.receive_weights(ORDER, nothing, nothing)
        assert engine.violations[0] == "receive_weights while running"
        assert "embed.weight was written during a step" in engine.violations
        await engine.aclose()

    run(main())


def test_second_session_is_noticed() -> None:
    """Each transfer is followed by finish or abort before the next."""

    async def main() -> None:
        engine = await joined()
        await engine.receive_weights(ORDER, nothing, nothing)
        await engine.receive_weights(ORDER, nothing, nothing)
        assert engine.violations == ["receive_weights while u is open"]

    run(main())


def test_dead_engine_stays_dead() -> None:
    """Every call after it says so."""

    async def main() -> None:
        engine = await joined({"receive_weights": {1: Step(dies=True, after_parts=2)}})
        with pytest.raises(EngineDeadError):
            await engine.receive_weights(ORDER, nothing, nothing)
        with pytest.raises(EngineDeadError):
            await engine.observe()
        with pytest.raises(EngineDeadError):
            await engine.resume()
        await engine.aclose()

    run(main())


def test_script_counts_calls_per_verb() -> None:
    """Number 0 stands for every call without an entry."""

    async def main() -> None:
        engine = FakeEngine(FakeScript({"flush_cache": {0: failing("always"), 2: Step()}}))
        for is_ok in (False, True, False):
            if is_ok:
                await engine.flush_cache()
                continue
            with pytest.raises(EngineError) as caught:
                await engine.flush_cache()
            assert caught.value.code is FaultCode.ENGINE_FAILED

    run(main())


def test_stale_prefix_shows_in_the_tokens() -> None:
    """New weights over an old prefix give tokens of neither version."""

    async def main() -> None:
        engine = await joined()
        await engine.resume()

        async def tokens() -> list[int]:
            request = engine.submit("r", (1, 2, 3), 4)
            await request.ended.wait()
            assert len(request.spans) == 1
            return request.tokens

        old = await tokens()
        await engine.pause(PauseMode.KEEP, False)
        await engine.receive_weights(ORDER, nothing, nothing)
        await engine.finish_update(V1)
        await engine.resume()
        stale = await tokens()
        await engine.flush_cache()
        new = await tokens()
        assert len({tuple(old), tuple(stale), tuple(new)}) == 3
        assert engine.held["embed.weight"] == V1 != INITIAL
        await engine.aclose()

    run(main())


def test_request_over_an_update_has_a_span_per_version() -> None:
    """Which token came from which weights."""

    async def main() -> None:
        engine = await joined()
        await engine.resume()
        request = engine.submit("r", (1,), 20)
        await asyncio.sleep(0.055)
        await engine.pause(PauseMode.KEEP, True)
        at = len(request.tokens)
        await engine.receive_weights(ORDER, nothing, nothing)
        await engine.resume()
        await request.ended.wait()
        assert [(s.start, s.end) for s in request.spans] == [(0, at), (at, 20)]
        await engine.aclose()

    run(main())


def test_pause_returns_only_when_no_step_runs() -> None:
    """And none begins until resume: the first write can't meet one."""

    async def main() -> None:
        engine = FakeEngine(step_s=1.0)
        request = engine.submit("r", (1,), 20)
        await asyncio.sleep(2.5)
        await engine.pause(PauseMode.KEEP, False)
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
        assert not engine.requests.is_in_step
        num_tokens = len(request.tokens)
        await asyncio.sleep(10.0)
        assert len(request.tokens) == num_tokens == 3
        await engine.resume()
        await request.ended.wait()
        await engine.aclose()

    run(main())


def test_flush_makes_held_requests_compute_their_prefix_again() -> None:
    """Otherwise a kept request would go on over blocks of the old weights."""

    async def main() -> None:
        engine = await joined()
        await engine.resume()
        request = engine.submit("r", (1,), 20)
        await asyncio.sleep(0.055)
        await engine.pause(PauseMode.KEEP, False)
        old = request.prefix
        await engine.receive_weights(ORDER, nothing, nothing)
        await engine.finish_update(V1)
        await engine.flush_cache()
        assert request.prefix is None
        await engine.resume()
        await request.ended.wait()
        assert request.prefix not in (None, old)
        await engine.aclose()

    run(main())


@pytest.mark.parametrize(("content", "why"), [(None, "No such file or directory"), ("{", "garbled"), ("[]", "garbled")])
def test_folder_that_it_cannot_load_is_told_in_words(tmp_path: Path, content: str | None, why: str) -> None:
    """Not by the name of an exception, which says nothing to whoever tries rlbus out with it."""
    if content is not None:
        (tmp_path / "fake_weights.json").write_text(content)

    async def main() -> None:
        engine = await joined()
        with pytest.raises(ManifestError, match=why) as refused:
            await engine.check_checkpoint(str(tmp_path))
        with pytest.raises(UpdateFailedError, match=why) as failed:
            await engine.load_weights(str(tmp_path), V1)
        assert "FileNotFoundError" not in f"{refused.value} {failed.value}"

    run(main())
