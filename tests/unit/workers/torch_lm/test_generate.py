"""Generation in its thread: pauses, caches and versions over a real tiny model."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rlbus.errors import ClosedError, EngineDeadError
from rlbus.schemas import PausedData, PauseMode
from rlbus.workers.torch_lm import generate
from rlbus.workers.torch_lm.generate import Generation, RequestError
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import CausalLM, load_model
from rlbus.workers.torch_lm.sampling import Sampling
from rlbus.workers.torch_lm.schedule import VersionSpan

pytestmark = pytest.mark.unit

PROMPT = tuple(range(10, 45))
GREEDY = Sampling(max_tokens=12, temperature=0, ignores_eos=True)
LONG = Sampling(max_tokens=60, temperature=0, ignores_eos=True)
Check = Callable[[Generation, CausalLM], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Of torch's own: a tiny model gains nothing from more, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model."""
    return make_tiny_model(tmp_path_factory.mktemp("torch_lm") / "m")


class Paced:
    """Has a model do at most one step for each turn of the loop: no request ends while the loop gets no CPU."""

    def __init__(self, model: CausalLM) -> None:
        self._turned = threading.Event()
        self._is_over = False
        step = model.step

        def paced(*args: Any) -> Any:
            if not self._is_over:
                assert self._turned.wait(60.0)
                self._turned.clear()
            return step(*args)

        model.step = paced  # type: ignore[method-assign,assignment]

    async def turn(self) -> None:
        """Cancel: from then on no step waits."""
        try:
            while True:
                self._turned.set()
                await asyncio.sleep(0.0005)
        finally:
            self._is_over = True
            self._turned.set()


def run(folder: Path, check: Check) -> None:
    """On a running engine, closed afterwards."""
    model = load_model(folder)
    paced = Paced(model)
    generation = Generation(model)

    async def main() -> None:
        async with asyncio.timeout(100.0):
            turning = asyncio.ensure_future(paced.turn())
            await check(generation, model)
            turning.cancel()

    generation.start()
    try:
        asyncio.run(main())
    finally:
        generation.close()


async def begun(generation: Generation) -> "asyncio.Task[Any]":
    """A long request with its first token."""
    first = asyncio.Event()
    task = asyncio.ensure_future(generation.generate(PROMPT, LONG, request_id="long", on_token=first.set))
    await first.wait()
    return task


def change(model: CausalLM) -> None:
    """Other weights, in place."""
    torch.manual_seed(3)
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn_like(tensor) * 0.05)


def test_batched_requests_get_the_tokens_that_they_get_alone(folder: Path) -> None:
    """And those of the uncached model."""

    async def check(generation: Generation, model: CausalLM) -> None:
        prompts = [PROMPT[:n] for n in (1, 7, 16, 33)]
        together = await asyncio.gather(*(generation.generate(p, GREEDY) for p in prompts))
        for prompt, finished in zip(prompts, together, strict=True):
            assert (await generation.generate(prompt, GREEDY)).tokens == finished.tokens
            text = [*prompt]
            for _ in range(12):
                with torch.no_grad():
                    text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
            assert tuple(text[len(prompt) :]) == finished.tokens

    run(folder, check)


def test_held_request_goes_on_with_new_weights_and_says_so(folder: Path) -> None:
    """After a flush it is computed anew, so the rest is what the new weights make of the text so far."""

    async def check(generation: Generation, model: CausalLM) -> None:
        generation.relabel("0.1")
        task = await begun(generation)
        held = await generation.pause(PauseMode.KEEP, clear_cache=True)
        assert held == PausedData(num_aborted=0, num_held=1)
        change(model)
        generation.relabel("0.2")
        generation.resume()
        finished = await task
        [old, new] = finished.spans
        assert (old.version, new.version) == ("0.1", "0.2")
        assert (old.start, old.end, new.end) == (0, new.start, 60)
        text = (*PROMPT, *finished.tokens[: new.start])
        rest = await generation.generate(text, Sampling(max_tokens=10, temperature=0, ignores_eos=True))
        assert rest.tokens == finished.tokens[new.start : new.start + 10]

    run(folder, check)


def test_prefix_cache_is_used_and_never_by_other_weights(folder: Path) -> None:
    """Even without a flush, and even when the label is the same again."""

    async def check(generation: Generation, model: CausalLM) -> None:
        generation.relabel("0.1")
        before = await generation.generate(PROMPT, GREEDY)
        assert await generation.generate(PROMPT, GREEDY) != before  # another id
        assert generation.prefixes.num_hit_tokens == 32
        await generation.pause(PauseMode.KEEP, clear_cache=False)
        change(model)
        generation.relabel("0.1")
        generation.resume()
        after = await generation.generate(PROMPT, GREEDY)
        assert generation.prefixes.num_hit_tokens == 32
        assert after.tokens != before.tokens
        assert after.spans == (VersionSpan("0.1", 0, 12),)
        await generation.flush()
        assert len(generation.prefixes) == 0

    run(folder, check)


def test_flush_beside_running_requests_changes_no_token(folder: Path) -> None:
    """They are computed again at the next step."""

    async def check(generation: Generation, model: CausalLM) -> None:
        whole = await generation.generate(PROMPT, LONG)
        task = await begun(generation)
        for _ in range(3):
            await generation.flush()
        assert (await task).tokens == whole.tokens

    run(folder, check)


def test_loop_stays_responsive_while_it_generates(folder: Path) -> None:
    """The loop turns many times during one request."""

    async def check(generation: Generation, model: CausalLM) -> None:
        task = await begun(generation)
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns > 20

    run(folder, check)


def test_cancelled_request_is_aborted(folder: Path) -> None:
    """Its place is free."""

    async def check(generation: Generation, model: CausalLM) -> None:
        task = await begun(generation)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert generation.num_requests == 0

    run(folder, check)


def test_cancelled_wait_pause_is_overtaken_by_resume(folder: Path) -> None:
    """Nothing stays behind that would pause it later."""

    async def check(generation: Generation, model: CausalLM) -> None:
        task = await begun(generation)
        pausing = asyncio.ensure_future(generation.pause(PauseMode.WAIT, clear_cache=False))
        await asyncio.sleep(0.01)
        pausing.cancel()
        generation.resume()
        assert (await task).finish == "length"
        assert (await generation.generate(PROMPT, GREEDY)).finish == "length"
        assert not generation.is_still

    run(folder, check)


def test_requests_that_can_not_be_taken_are_refused_with_the_reason(folder: Path) -> None:
    """Before anything is done for them."""

    async def check(generation: Generation, model: CausalLM) -> None:
        for prompt, sampling, problem in (
            ((), GREEDY, "empty"),
            ((512,), GREEDY, "token id 512"),
            ((-1,), GREEDY, "token id -1"),
            (PROMPT, Sampling(max_tokens=500), "context is 512"),
            (PROMPT, Sampling(num_top=513), "vocabulary"),
        ):
            with pytest.raises(RequestError, match=problem):
                await generation.generate(prompt, sampling)
        task = await begun(generation)
        with pytest.raises(RequestError, match="taken"):
            await generation.generate(PROMPT, GREEDY, request_id="long")
        generation.abort(None)
        assert (await task).finish == "abort"

    run(folder, check)


def test_failing_step_ends_its_requests_and_the_engine_lives_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asked hears of it; the traceback is logged."""

    async def check(generation: Generation, model: CausalLM) -> None:
        step = model.step
        model.step = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
        with caplog.at_level(logging.CRITICAL, "rlbus.workers"):
            assert (await generation.generate(PROMPT, GREEDY)).finish == "error"
        model.step = step  # type: ignore[method-assign]
        assert (await generation.generate(PROMPT, GREEDY)).finish == "length"

    run(folder, check)


def test_closed_engine_ends_its_requests_and_takes_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says that it is dead."""
    monkeypatch.setattr(generate, "CLOSE_S", 60.0)

    async def check(generation: Generation, model: CausalLM) -> None:
        task = await begun(generation)
        await asyncio.to_thread(generation.close)
        assert (await task).finish == "abort"
        with pytest.raises(ClosedError):
            await generation.generate(PROMPT, GREEDY)
        with pytest.raises(EngineDeadError):
            generation.check_alive()

    run(folder, check)
