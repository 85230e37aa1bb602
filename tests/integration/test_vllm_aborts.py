"""Aborts at a real vLLM server: before the first token, before vLLM has heard of the request, at once, and of all."""

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlbus import subjects
from rlbus._transport import Message
from rlbus.bus import Bus
from rlbus.codec import decode
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.schemas import (
    AbortedData,
    AbortRequest,
    Announcement,
    Command,
    CommandBody,
    FaultCode,
    PauseGeneration,
    Result,
    ResultStatus,
    ResumeGeneration,
    Sleep,
    WakeUp,
    WorkerAnswer,
    WorkerMessage,
    route_of,
)
from rlbus.server import EmbeddedServer
from rlbus.workers.torch_lm.make import make_tiny_model
from tests.tries import TooLateError, best_of_async

# A start takes 25 s on 2 cores, and 80 s when others use them, too.
START_S = 240.0
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", str(32 << 20))
LONG_TOKENS = 220
# One command, or one completion, on a machine that is busy with other things.
CALL_S = 120.0
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(2 * START_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


class Worker:
    """The other end of the bus, and of the server's HTTP port."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._num_sent = 0
        self.announced: asyncio.Future[Announcement] = asyncio.get_running_loop().create_future()
        bus.subscribe(subjects.worker("default", "backend", "7"), WorkerMessage, self._on_message)

    def _on_message(self, message: WorkerMessage, _: Message) -> None:
        if isinstance(message, Announcement) and not self.announced.done():
            self.announced.set_result(message)

    async def send(self, body: CommandBody) -> Result:
        """Send a command; its result."""
        self._num_sent += 1
        ended: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def on_reply(message: Message, _: str) -> None:
            answer = None if message.no_responders else decode(message.data, WorkerAnswer, message.subject)
            if isinstance(answer, Result) and not ended.done():
                ended.set_result(answer)

        inbox = self._bus.open_inbox(on_reply)
        command = Command(op_id=f"op-{self._num_sent}", term=1, expires_at=time.time() + CALL_S, body=body)
        self._bus.publish(subjects.command_to("default", "backend", route_of(body), "7"), command, inbox.reply)
        return await asyncio.wait_for(ended, CALL_S + 30.0)

    async def ok(self, body: CommandBody) -> Any:
        result = await self.send(body)
        assert result.status is ResultStatus.OK, result.fault
        return result.data

    def post(self, request_id: str, max_tokens: int = LONG_TOKENS) -> "Post":
        url = urlsplit(self.announced.result().descriptor.completions_url or "")
        assert url.hostname is not None
        assert url.port is not None
        return Post(url.hostname, url.port, request_id, max_tokens)


class Post:
    """One streamed completion. Its body is sent when `may_end` is set: until then the server has its head only."""

    def __init__(self, host: str, port: int, request_id: str, max_tokens: int) -> None:
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.num_chunks = 0
        self.finish: str | None = None
        self.first = asyncio.Event()
        body = {"model": "", "prompt": [5, 6, 7], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        self._body = body | {"return_token_ids": True}
        self.task = asyncio.get_running_loop().create_task(self._run(host, port, request_id))

    def of(self, model: str) -> "Post":
        self._body["model"] = model
        return self

    async def _run(self, host: str, port: int, request_id: str) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            body = json.dumps(self._body).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: {request_id}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body[:1])
            await self.may_end.wait()
            writer.write(body[1:])
            while line := await reader.readline():
                self._hear(line)
        finally:
            writer.close()

    def _hear(self, line: bytes) -> None:
        if not line.startswith(b"data: {"):
            return
        choice = json.loads(line[6:])["choices"][0]
        self.num_chunks += bool(choice["token_ids"])
        self.finish = choice["finish_reason"] or self.finish
        self.first.set()

    async def ended(self) -> str | None:
        await asyncio.wait_for(self.task, CALL_S)
        return self.finish


@asynccontextmanager
async def vllm_on_bus(folder: Path) -> AsyncIterator[Worker]:
    """A real server with its agent; ended with the context."""
    async with EmbeddedServer() as server, await connect_bus(BusConfig(url=server.url), name="test") as bus:
        worker = Worker(bus)
        env = {k: v for k, v in os.environ.items() if not k.startswith("RLBUS_")}
        env |= {"RLBUS_URL": server.url, "XDG_STATE_HOME": str(folder / "state"), "CUDA_VISIBLE_DEVICES": ""}
        command = ["worker", "vllm", str(folder / "model"), "--small", "--instance-id", "7", *OPTIONS]
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rlbus", *command, env=env, stdout=log, stderr=log
            )
            try:
                await asyncio.wait_for(asyncio.shield(worker.announced), START_S)
                yield worker
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 60.0) == 0
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()


def aborted(num_aborted: int, num_deferred: int, num_left: int | None = None) -> AbortedData:
    return AbortedData(num_aborted=num_aborted, num_deferred=num_deferred, num_left=num_left)


def test_an_abort_at_a_real_server_comes_at_the_right_moment(tmp_path: Path) -> None:
    """SCENARIOS 29: deferred to the first token, found before vLLM has the request, at once after it; and no sleep."""

    async def until_deferred(worker: Worker, request_id: str) -> None:
        async with asyncio.timeout(CALL_S):
            while await worker.ok(AbortRequest(request_ids=(request_id,))) != aborted(0, 1):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    async def before_the_first_token(worker: Worker, model: str) -> None:
        await worker.ok(PauseGeneration())
        hit, other = worker.post("hit").of(model), worker.post("other", 5).of(model)
        await asyncio.sleep(0.5)  # until both are in vLLM; if not, the next case is what is tested
        await until_deferred(worker, "hit")
        assert await worker.ok(AbortRequest(request_ids=("hit", "nobody"))) == aborted(0, 0)
        assert not hit.task.done()
        await worker.ok(ResumeGeneration())
        ended = await hit.ended(), await other.ended()
        if ended[0] == "length":
            raise TooLateError("it had all of its tokens at once")
        assert ended == ("abort", "length")
        assert 1 <= hit.num_chunks < LONG_TOKENS

    async def before_vllm_has_heard_of_it(worker: Worker, model: str) -> None:
        post = worker.post("early").of(model)
        post.may_end.clear()
        await until_deferred(worker, "early")
        post.may_end.set()
        if await post.ended() == "length":
            raise TooLateError("it had all of its tokens at once")
        assert post.finish == "abort"
        assert 1 <= post.num_chunks < LONG_TOKENS

    async def after_the_first_token(worker: Worker, model: str) -> None:
        post = worker.post("late").of(model)
        await asyncio.wait_for(post.first.wait(), CALL_S)
        found = await worker.ok(AbortRequest(request_ids=("late",)))
        if await post.ended() == "length":
            raise TooLateError("it had ended by itself")
        assert (found, post.finish) == (aborted(1, 0), "abort")

    async def all_of_them(worker: Worker, model: str) -> None:
        running = worker.post("running").of(model)
        await asyncio.wait_for(running.first.wait(), CALL_S)
        await worker.ok(PauseGeneration())
        waiting = worker.post("waiting").of(model)
        await asyncio.sleep(0.5)
        found = await worker.ok(AbortRequest())
        is_late = found.num_deferred == 0
        async with asyncio.timeout(CALL_S):
            while found.num_deferred == 0:  # the one that waits hadn't come by then
                await asyncio.sleep(0.1)
                found = await worker.ok(AbortRequest())
        await worker.ok(ResumeGeneration())
        ended = await running.ended(), await waiting.ended()
        # Two are left where the engine hasn't ended the one that ran within what the abort waits for it.
        if is_late or "length" in ended or found.num_left == 2:
            raise TooLateError(f"they weren't both there, or not in time: {found}, {ended}")
        assert found == aborted(1, 1, 1)
        assert ended == ("abort", "abort")
        assert await worker.ok(AbortRequest()) == aborted(0, 0, 0)
        after = worker.post("after", 5).of(model)
        assert await after.ended() == "length"

    async def main() -> None:
        async with vllm_on_bus(tmp_path) as worker:
            descriptor = worker.announced.result().descriptor
            assert not {"sleep", "wake_up"} & set(descriptor.routes)
            for body in (Sleep(), WakeUp()):
                refused = await worker.send(body)
                assert refused.fault is not None
                assert refused.fault.code is FaultCode.NO_ROUTE
            for case in (before_the_first_token, before_vllm_has_heard_of_it, after_the_first_token, all_of_them):
                await best_of_async(partial(case, worker, descriptor.model))

    make_tiny_model(tmp_path / "model", vocab_size=512)
    try:
        asyncio.run(main())
    except BaseException:
        sys.stderr.write((tmp_path / "log").read_text()[-6000:])
        raise
