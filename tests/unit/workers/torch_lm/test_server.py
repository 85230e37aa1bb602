"""The HTTP routes over a real tiny model, without a socket."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")

from rlbus.schemas import PauseMode
from rlbus.workers.torch_lm import generate, server
from rlbus.workers.torch_lm.completions import find_tokenizer
from rlbus.workers.torch_lm.generate import Generation
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from rlbus.workers.torch_lm.server import make_app

pytestmark = pytest.mark.unit

Check = Callable[[httpx.AsyncClient, Generation], Coroutine[Any, Any, None]]
GREEDY = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model."""
    return make_tiny_model(tmp_path_factory.mktemp("torch_lm") / "m")


def run(folder: Path, check: Check) -> None:
    """On a running engine, closed afterwards."""
    generation = Generation(load_model(folder))
    app = make_app(generation, "tiny", find_tokenizer(folder))

    async def main() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with asyncio.timeout(100.0), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await check(client, generation)

    generation.start()
    try:
        asyncio.run(main())
    finally:
        generation.close()


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """A successful completion."""
    answer = await client.post("/v1/completions", json={"prompt": [5, 6], **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def until(is_so: Callable[[], bool]) -> None:
    """Let the loop turn until something is so; the whole test is bounded."""
    while not is_so():  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0)


def test_completion_has_vllms_shape(folder: Path) -> None:
    """Ids, scores, usage, and the version of the weights."""

    async def check(client: httpx.AsyncClient, generation: Generation) -> None:
        generation.relabel("0.3")
        result = await complete(client, model="tiny")
        assert (result["object"], result["model"]) == ("text_completion", "tiny")
        assert result["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
        [choice] = result["choices"]
        assert len(choice["token_ids"]) == 5
        assert len(choice["logprobs"]["token_logprobs"]) == 5
        assert max(choice["logprobs"]["token_logprobs"]) < 0
        assert (choice["finish_reason"], choice["prompt_token_ids"]) == ("length", [5, 6])
        assert choice["weight_versions"] == [{"version": "0.3", "start": 0, "end": 5}]

    run(folder, check)


def test_several_prompts_and_samples_are_in_order_and_follow_the_seed(folder: Path) -> None:
    """Prompt by prompt, sample by sample; the samples of one prompt differ, and repeat with the seed."""

    async def check(client: httpx.AsyncClient, generation: Generation) -> None:
        fields: dict[str, Any] = {"prompt": [[5, 6], [7]], "n": 2, "temperature": 1.0, "seed": 11}
        result = await complete(client, **fields)
        choices = result["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        assert [c["prompt_token_ids"] for c in choices] == [[5, 6], [5, 6], [7], [7]]
        assert choices[0]["token_ids"] != choices[1]["token_ids"]
        again = await complete(client, **fields)
        assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in choices]
        assert result["usage"]["prompt_tokens"] == 3

    run(folder, check)


def test_text_prompt_is_tokenized_and_text_comes_back(folder: Path) -> None:
    """As vLLM does."""
    pytest.importorskip("tokenizers")

    async def check(client: httpx.AsyncClient, generation: Generation) -> None:
        result = await complete(client, prompt="hi")
        [choice] = result["choices"]
        tokenizer = find_tokenizer(folder)
        assert tokenizer is not None
        assert choice["prompt_token_ids"] == tokenizer.encode("hi")
        assert choice["text"] == tokenizer.decode(choice["token_ids"])

    run(folder, check)


def test_bad_requests_get_an_error_in_openais_shape(folder: Path) -> None:
    """With the field, and nothing is left running."""

    async def check(client: httpx.AsyncClient, generation: Generation) -> None:
        for fields, status, named in (
            ({"stream": True}, 400, "stream"),
            ({"prompt": [9999]}, 400, "9999"),
            ({"prompt": [[5], [9999]], "max_tokens": 300}, 400, "9999"),
            ({"max_tokens": 600}, 400, "context"),
            ({"prompt": []}, 400, "empty"),
            ({"model": "other"}, 404, "other"),
        ):
            answer = await client.post("/v1/completions", json={"prompt": [5], **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, status)
            assert named in error["message"]
            assert set(error) == {"message", "type", "param", "code"}
        assert generation.num_requests == 0
        assert (await client.get("/v1/nothing")).json()["error"]["code"] == 404
        assert (await client.get("/v1/completions")).json()["error"]["code"] == 405

    run(folder, check)


def test_body_over_the_limit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is parsed."""
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 100)

    async def check(client: httpx.AsyncClient, generation: Generation) -> None:
        answer = await client.post("/v1/completions", json={"prompt": [5] * 100})
        assert answer.status_code == 400
        assert "100 bytes" in answer.json()["error"]["message"]

    run(folder, check)


def test_models_version_and_health_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is paused; not once it is closed."""
    monkeypatch.setattr(generate, "CLOSE_S", 60.0)

    async def check(client: httpx.AsyncClient, generation: Generation) -> None:
        await generation.pause(PauseMode.KEEP, clear_cache=True)
        assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == ["tiny"]
        assert (await client.get("/version")).json()["weight_version"] is None
        assert (await client.get("/health")).status_code == 200
        await asyncio.to_thread(generation.close)
        assert (await client.get("/health")).status_code == 503
        answer = await client.post("/v1/completions", json={"prompt": [5]})
        assert answer.status_code == 503

    run(folder, check)


def test_request_is_held_while_the_engine_is_paused(folder: Path) -> None:
    """And answered after resume."""

    async def check(client: httpx.AsyncClient, generation: Generation) -> None:
        expected = await complete(client)
        await generation.pause(PauseMode.KEEP, clear_cache=True)
        held = asyncio.ensure_future(complete(client))
        await until(lambda: generation.num_requests == 1)
        assert not held.done()
        generation.resume()
        assert (await held)["choices"] == expected["choices"]

    run(folder, check)


def test_client_that_goes_away_aborts_its_requests(folder: Path) -> None:
    """They don't keep their places."""

    async def check(client: httpx.AsyncClient, generation: Generation) -> None:
        await generation.pause(PauseMode.KEEP, clear_cache=True)
        app = make_app(generation, "tiny", None)
        gone = asyncio.Event()
        parts = iter([{"type": "http.request", "body": b'{"prompt": [5], "n": 3}'}])

        async def receive() -> dict[str, Any]:
            part = next(parts, None)
            if part is not None:
                return part
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        serving = asyncio.ensure_future(app(scope, receive, send))
        await until(lambda: generation.num_requests == 3)
        gone.set()
        await serving
        assert generation.num_requests == 0

    run(folder, check)
