"""The torch engine with adapters: revisions over HTTP equal their merged models, and never each other's cache."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")

from rlbus.schemas import PauseMode, Version
from rlbus.workers.engines.torch_engine import TorchEngine
from rlbus.workers.torch_lm.generate import UnknownModelError
from rlbus.workers.torch_lm.make import make_tiny_adapter, make_tiny_model, merge_tiny_adapter
from rlbus.workers.torch_lm.sampling import Sampling
from tests.tries import TooLateError, best_of

pytestmark = pytest.mark.integration

GREEDY = Sampling(max_tokens=16, temperature=0.0, ignores_eos=True)
PROMPT = tuple(range(10, 60))
NUM_LONG = 300
LIMIT_S = 180.0


def play(scenario: Callable[[TorchEngine], Coroutine[Any, Any, None]], model: Path) -> None:
    """Run a scenario against a started engine."""

    async def main() -> None:
        engine = TorchEngine(model)
        try:
            await engine.start()
            async with asyncio.timeout(LIMIT_S):
                await scenario(engine)
        finally:
            await engine.aclose()

    asyncio.run(main())


async def greedy(engine: TorchEngine, adapter: str | None = None) -> tuple[int, ...]:
    """What it generates now."""
    return (await engine.generate(PROMPT, GREEDY, adapter=adapter)).tokens


def adapters_of(tmp_path: Path) -> tuple[Path, list[Path], list[tuple[int, ...]]]:
    """A model, two adapters, and what the models that they are merged into generate."""
    model = make_tiny_model(tmp_path / "model")
    adapters = [make_tiny_adapter(tmp_path / f"a{n}", model, seed=n) for n in (1, 2)]
    expected: list[tuple[int, ...]] = []

    async def scenario(engine: TorchEngine) -> None:
        expected.append(await greedy(engine))

    for number, adapter in enumerate(adapters):
        play(scenario, merge_tiny_adapter(tmp_path / f"m{number}", model, adapter))
    assert expected[0] != expected[1]
    return model, adapters, expected


def test_each_revision_generates_what_its_merged_model_does(tmp_path: Path) -> None:
    """SCENARIOS 31: over HTTP by model name, with a prompt that all have cached; the base model is as before."""
    model, adapters, expected = adapters_of(tmp_path)

    async def scenario(engine: TorchEngine) -> None:
        base = await greedy(engine)
        async with httpx.AsyncClient(base_url=engine.info.completions_url or "", timeout=LIMIT_S) as client:

            async def ask(name: str) -> tuple[int, tuple[int, ...]]:
                body = {"model": name, "prompt": list(PROMPT), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
                answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
                if answer.status_code != 200:
                    return answer.status_code, ()
                return 200, tuple(answer.json()["choices"][0]["token_ids"])

            async def models() -> list[str]:
                return [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]]

            assert await ask("policy") == (404, ())
            for revision in (1, 2):
                await engine.load_lora("policy", revision, adapters[revision - 1])
                for name in (f"policy@{revision}", "policy"):
                    assert await ask(name) == (200, expected[revision - 1])
            assert await ask("policy@1") == (200, expected[0])
            assert await ask(str(model)) == (200, base)
            assert await models() == [str(model), "policy", "policy@1", "policy@2"]
            await engine.drain_lora("policy", 2)
            assert await ask("policy") == (200, expected[0])
            assert await ask("policy@2") == (404, ())
            await engine.unload_lora("policy", 1)
            assert await ask("policy") == (404, ())
            assert await models() == [str(model)]

    play(scenario, model)


def test_requests_of_several_adapters_run_in_one_batch(tmp_path: Path) -> None:
    """Each gets what it gets alone."""
    model, adapters, expected = adapters_of(tmp_path)

    async def scenario(engine: TorchEngine) -> None:
        base = await greedy(engine)
        for revision in (1, 2):
            await engine.load_lora("policy", revision, adapters[revision - 1])
        names = [None, "policy@1", "policy@2", None, "policy@2"]
        found = await asyncio.gather(*(greedy(engine, name) for name in names))
        assert found == [base, expected[0], expected[1], base, expected[1]]

    play(scenario, model)


def test_hot_swap_lets_requests_go_on_with_the_new_revision_computed_anew(tmp_path: Path) -> None:
    """What is generated after it is what the new merged model generates after the same tokens."""
    model, adapters, expected = adapters_of(tmp_path)

    async def scenario(engine: TorchEngine) -> None:
        await engine.load_lora("policy", 1, adapters[0])
        begun, num_tokens = asyncio.Event(), 0

        def on_token() -> None:
            nonlocal num_tokens
            num_tokens += 1
            begun.set()

        long = Sampling(max_tokens=NUM_LONG, temperature=0.0, ignores_eos=True)
        running = asyncio.ensure_future(engine.generate(PROMPT, long, adapter="policy", on_token=on_token))
        await begun.wait()
        await engine.pause(PauseMode.KEEP, clear_cache=False)
        cut = 0
        while cut != num_tokens:  # what had been generated is told
            cut = num_tokens
            await asyncio.sleep(0.2)
        if cut + GREEDY.max_tokens > NUM_LONG:
            raise TooLateError(f"{cut} tokens had been generated before the pause")
        await engine.load_lora("policy", 2, adapters[1], replaces=1)
        await engine.resume()
        tokens = (await running).tokens
        with pytest.raises(UnknownModelError):
            await greedy(engine, "policy@1")
        assert await greedy(engine, "policy@2") == expected[1]
        after = await engine.generate((*PROMPT, *tokens[:cut]), GREEDY, adapter="policy@2")
        assert after.tokens == tokens[cut : cut + GREEDY.max_tokens]

    best_of(lambda: play(scenario, model))


def test_adapter_stays_over_a_reload_of_the_base_model(tmp_path: Path) -> None:
    """And adds to the new weights."""
    model, adapters, _ = adapters_of(tmp_path)
    other = make_tiny_model(tmp_path / "other", seed=5)
    expected: list[tuple[int, ...]] = []

    async def alone(engine: TorchEngine) -> None:
        expected.append(await greedy(engine))

    async def scenario(engine: TorchEngine) -> None:
        await engine.load_lora("policy", 1, adapters[0])
        before = await greedy(engine, "policy")
        await engine.pause(PauseMode.ABORT, clear_cache=True)
        await engine.load_weights(str(other), Version(step=1))
        await engine.resume()
        assert await greedy(engine, "policy") == expected[0] != before

    play(alone, merge_tiny_adapter(tmp_path / "merged", other, adapters[0]))
    play(scenario, model)
