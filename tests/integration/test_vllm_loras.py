"""A real vLLM server on the bus with adapters: revision 1, then 2, by its own OpenAI routes, equal to merged models."""

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from rlbus import subjects
from rlbus._transport import Message
from rlbus.adapter import adapter_sum
from rlbus.bus import Bus
from rlbus.codec import decode
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.schemas import (
    Announcement,
    Command,
    CommandBody,
    FolderSource,
    GetLoras,
    LoadLora,
    LorasData,
    LoraState,
    PauseGeneration,
    Result,
    ResultStatus,
    ResumeGeneration,
    UnloadLora,
    WorkerAnswer,
    WorkerMessage,
    lora_id,
    route_of,
)
from rlbus.server import EmbeddedServer
from tests.tries import TooLateError, best_of_async

# A start takes 25 s on 2 cores, and minutes when others use them, too.
LIMIT_S = 600.0
CALL_S = 180.0
OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", str(32 << 20)),
    *("--enable-lora", "--max-loras", "3", "--max-cpu-loras", "3", "--max-lora-rank", "8"),
)
PROMPT = list(range(10, 60))
NUM_LONG = 190
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def merged_tokens(model: Path, adapter: Path | None, folder: Path) -> list[int]:
    """What the model with the adapter merged into it generates, greedily, in plain torch."""
    import torch

    from rlbus.workers.torch_lm.make import merge_tiny_adapter
    from rlbus.workers.torch_lm.model import load_model

    whole = load_model(model if adapter is None else merge_tiny_adapter(folder, model, adapter))
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(16):
            tokens.append(int(whole(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


class Worker:
    """The worker as the bus and its completions URL show it."""

    def __init__(self, bus: Bus, http: httpx.AsyncClient, model: str) -> None:
        self._bus = bus
        self._http = http
        self.model = model
        self._num = 0

    async def send(self, body: CommandBody) -> Result:
        """Command it, and wait for its result."""
        self._num += 1
        came: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def on_reply(message: Message, _: str) -> None:
            answer = None if message.no_responders else decode(message.data, WorkerAnswer, message.subject)
            if isinstance(answer, Result) and not came.done():
                came.set_result(answer)

        expires_at = self._bus.clock.now() + CALL_S
        command = Command(op_id=f"op-{self._num}", term=1, expires_at=expires_at, body=body)
        subject = subjects.command_to("default", "backend", route_of(body), "7")
        self._bus.publish(subject, command, self._bus.open_inbox(on_reply).reply)
        return await asyncio.wait_for(came, CALL_S)

    async def loras(self, body: CommandBody) -> dict[str, LoraState]:
        """A command about adapters that goes well; those that it answers with."""
        result = await self.send(body)
        assert result.status is ResultStatus.OK, result.fault
        assert isinstance(result.data, LorasData)
        return {lora_id(v.name, v.revision or 0): v.state for v in result.data.loras}

    async def load(self, revision: int, adapter: Path) -> dict[str, LoraState]:
        """Load it while nothing is generated; what is there then."""
        source, checksum = FolderSource(path=str(adapter)), adapter_sum(adapter).checksum
        await self.send(PauseGeneration())
        shown = await self.loras(LoadLora(name="policy", revision=revision, checksum=checksum, source=source))
        await self.send(ResumeGeneration())
        return shown

    async def num_in_flight(self, name: str, revision: int) -> int | None:
        """How many requests name it."""
        data = (await self.send(GetLoras())).data
        assert isinstance(data, LorasData)
        return next(v.num_in_flight for v in data.loras if (v.name, v.revision) == (name, revision))

    async def tokens(self, model: str, num_tokens: int = 16) -> tuple[int, str, list[int]]:
        """Status, the model that answered, and the tokens."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        answer = await self._http.post("/v1/completions", json={**body, "return_token_ids": True})
        if answer.status_code != 200:
            return answer.status_code, "", []
        return 200, answer.json()["model"], answer.json()["choices"][0]["token_ids"]

    async def models(self) -> list[str]:
        """What /v1/models lists."""
        return [entry["id"] for entry in (await self._http.get("/v1/models")).json()["data"]]


async def scenario(worker: Worker, adapters: list[Path], expected: list[list[int]], base: list[int]) -> None:
    """One revision after the other, and their ends."""
    assert await worker.tokens(worker.model) == (200, worker.model, base)
    assert (await worker.tokens("policy"))[0] == 404
    for revision, adapter in enumerate(adapters, start=1):
        assert set(await worker.load(revision, adapter)) == {lora_id("policy", n) for n in range(1, revision + 1)}
        for name in (f"policy@{revision}", "policy"):
            assert await worker.tokens(name) == (200, f"policy@{revision}", expected[revision - 1])
    assert await worker.tokens("policy@1") == (200, "policy@1", expected[0])
    assert await worker.tokens(worker.model) == (200, worker.model, base)
    assert await worker.models() == [worker.model, "policy@1", "policy@2"]
    await best_of_async(lambda: drained(worker, adapters[1], expected))
    assert await worker.loras(UnloadLora(name="policy", revision=1)) == {}
    assert await worker.models() == [worker.model]


async def drained(worker: Worker, second: Path, expected: list[list[int]]) -> None:
    """A request in flight keeps its adapter until it has ended."""
    await worker.load(2, second)  # it may be gone since an earlier try
    long = asyncio.ensure_future(worker.tokens("policy@2", NUM_LONG))
    async with asyncio.timeout(LIMIT_S):
        while await worker.num_in_flight("policy", 2) == 0 and not long.done():  # noqa: ASYNC110 - another process has no Event
            await asyncio.sleep(0.01)
    states = await worker.loras(UnloadLora(name="policy", revision=2))
    is_late = "policy@2" not in states  # what named it had ended before
    assert is_late or states["policy@2"] is LoraState.DRAINING
    assert (await worker.tokens("policy@2"))[0] == 404
    assert await worker.tokens("policy") == (200, "policy@1", expected[0])
    status, _, tokens = await long
    assert (status, tokens[:16], len(tokens)) == (200, expected[1], NUM_LONG)
    async with asyncio.timeout(LIMIT_S):
        while set(await worker.loras(GetLoras())) != {"policy@1"}:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.1)
    if is_late:
        raise TooLateError("it had ended before the unload")


def test_revisions_generate_what_their_merged_models_do(tmp_path: Path) -> None:
    """SCENARIOS 31 and 32: with a prompt that all of them have cached; by the routes that rollouts use."""
    from rlbus.workers.torch_lm.make import make_tiny_adapter, make_tiny_model

    model = make_tiny_model(tmp_path / "model")
    adapters = [make_tiny_adapter(tmp_path / "adapters" / str(n), model, seed=n) for n in (1, 2)]
    expected = [merged_tokens(model, adapter, tmp_path / f"merged-{adapter.name}") for adapter in adapters]
    base = merged_tokens(model, None, tmp_path)
    assert len({tuple(tokens) for tokens in (*expected, base)}) == 3

    async def main() -> None:
        async with EmbeddedServer() as server, await connect_bus(BusConfig(url=server.url), name="test") as bus:
            heard: list[Announcement] = []
            subject = subjects.worker("default", "backend", "7")
            bus.subscribe(subject, WorkerMessage, lambda m, _: heard.append(m) if isinstance(m, Announcement) else None)
            env = {k: v for k, v in os.environ.items() if not k.startswith("RLBUS_")}
            env |= {"RLBUS_URL": server.url, "XDG_STATE_HOME": str(tmp_path / "state"), "CUDA_VISIBLE_DEVICES": ""}
            ours = ["--instance-id", "7", "--lora-root", str(tmp_path / "adapters"), "--small"]
            command = [sys.executable, "-m", "rlbus", "worker", "vllm", str(model), *ours, *OPTIONS]
            with (tmp_path / "log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(*command, env=env, stdout=log, stderr=log)
                try:
                    await until(lambda: bool(heard))
                    url = heard[-1].descriptor.completions_url
                    assert url is not None
                    assert {"load_lora", "unload_lora", "list_loras"} <= set(heard[-1].descriptor.routes)
                    async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
                        await scenario(Worker(bus, http, str(model)), adapters, expected, base)
                    process.terminate()
                    assert await asyncio.wait_for(process.wait(), 60.0) == 0
                finally:
                    if process.returncode is None:
                        process.kill()
                    await process.wait()

    try:
        asyncio.run(main())
    except BaseException:
        sys.stderr.write((tmp_path / "log").read_text()[-6000:])
        raise


async def until(is_true: Callable[[], bool]) -> None:
    """Look until it is."""
    async with asyncio.timeout(LIMIT_S):
        while not is_true():  # noqa: ASYNC110 - another process has no Event
            await asyncio.sleep(0.05)
