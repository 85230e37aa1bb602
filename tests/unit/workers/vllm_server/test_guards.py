"""Guards around the requests of a vLLM server: aborts before the first token, at the entrance, and at most once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rlbus.testing import run
from rlbus.workers.vllm_server.guards import DRAIN_S, GUARDED_PATHS, Aborted, Guards, is_named

pytestmark = pytest.mark.unit


def chunk(*tokens: int, finish: str | None = None) -> Any:
    """One output of vLLM."""
    part = SimpleNamespace(token_ids=list(tokens), finish_reason=finish)
    return SimpleNamespace(outputs=[part], finished=finish is not None)


class Llm:
    """An engine whose requests say what `outputs` says, when the test lets them; notes aborts and closes."""

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={})
        self.outputs: dict[str, asyncio.Queue[Any]] = {}
        self.aborted: list[str] = []
        self.closed: list[str] = []
        # When set, a request is known to the engine only then: it is being tokenized.
        self.tokenized = asyncio.Event()
        self.tokenized.set()

    def say(self, name: str, output: Any) -> None:
        self.outputs.setdefault(name, asyncio.Queue()).put_nowait(output)

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        await self.tokenized.wait()
        self.output_processor.request_states[f"{request_id}-1"] = SimpleNamespace(external_req_id=request_id)
        try:
            while True:
                output = await self.outputs.setdefault(request_id, asyncio.Queue()).get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            await self.abort([f"{request_id}-1"], internal=True)
            raise
        finally:
            self.output_processor.request_states.pop(f"{request_id}-1", None)
            self.closed.append(request_id)

    async def abort(self, own: list[str], internal: bool) -> None:
        assert internal
        for key in own:
            self.aborted.append(key)
            state = self.output_processor.request_states.get(key)
            if state is not None:
                self.say(state.external_req_id, chunk(finish="abort"))


class Client:
    """Reads one request."""

    def __init__(self, llm: Llm, name: str) -> None:
        self.outputs: list[Any] = []
        self.task = asyncio.get_running_loop().create_task(self._read(llm, name))

    async def _read(self, llm: Llm, name: str) -> None:
        async for output in llm.generate("prompt", None, name):
            self.outputs.append(output)

    @property
    def finishes(self) -> list[Any]:
        return [output.outputs[0].finish_reason for output in self.outputs]


def on_guards(
    check: Callable[[Guards, Llm, Callable[[Any], Awaitable[Aborted]]], Coroutine[Any, Any, None]],
    *,
    defers_disconnects: bool = False,
) -> None:
    """Run a check in virtual time; afterwards no guard is left."""

    async def main() -> None:
        guards, llm = Guards(defers_disconnects=defers_disconnects), Llm()
        guards.wrap(llm)

        async def abort_names(names: list[str]) -> None:
            await llm.abort([f"{name}-1" for name in names], internal=True)

        await check(guards, llm, lambda ids: guards.abort(ids, abort_names))
        await guards.aclose()
        await asyncio.sleep(0)
        assert guards.num_requests == 0

    run(main())


async def turns() -> None:
    """Let everything go on that can."""
    await asyncio.sleep(0.01)


def test_an_abort_before_the_first_token_waits_for_it() -> None:
    """SCENARIOS 29: no engine abort before, exactly one after, and the ack says deferred; again it changes nothing."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        client = Client(llm, "r")
        await turns()
        assert await abort(["r"]) == Aborted(0, 1, 0)
        assert await abort(["r"]) == Aborted(0, 0, 0)
        llm.say("r", chunk())
        await turns()
        assert llm.aborted == []
        llm.say("r", chunk(7))
        await turns()
        assert llm.aborted == ["r-1"]
        await client.task
        assert client.finishes == [None, None, "abort"]
        assert await abort(["r"]) == Aborted(0, 0, 0)
        assert llm.aborted == ["r-1"]

    on_guards(check)


def test_an_abort_after_the_first_token_is_at_once_and_once() -> None:
    """Also when it is asked for twice before the engine has ended it."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        client = Client(llm, "r")
        llm.say("r", chunk(1))
        await turns()
        assert list(await asyncio.gather(abort(["r"]), abort(["r"]))) == [Aborted(1, 0, 0), Aborted(0, 0, 0)]
        await client.task
        assert llm.aborted == ["r-1"]

    on_guards(check)


@pytest.mark.parametrize("end", [chunk(finish="error"), ValueError("refused")], ids=["a chunk", "an exception"])
def test_an_error_is_no_first_token(end: Any) -> None:
    """SCENARIOS 29: the engine isn't told to abort what has failed by itself."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        client = Client(llm, "r")
        await turns()
        await abort(["r"])
        llm.say("r", end)
        await asyncio.wait({client.task})
        assert (client.task.exception() is None) == (not isinstance(end, Exception))
        assert llm.aborted == []

    on_guards(check)


def test_a_request_that_ends_with_its_first_token_is_not_aborted_any_more() -> None:
    """It is over, and an abort would hit nobody, or its successor."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        client = Client(llm, "r")
        await turns()
        await abort(["r"])
        llm.say("r", chunk(1, finish="length"))
        await client.task
        assert llm.aborted == []

    on_guards(check)


def test_the_guard_stays_until_the_close_has_finished() -> None:
    """SCENARIOS 29: an abort during the teardown finds it, and does nothing a second time."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        may_close = asyncio.Event()
        plain = llm.abort

        async def slow(own: list[str], internal: bool) -> None:
            await may_close.wait()
            await plain(own, internal)

        llm.abort = slow  # type: ignore[method-assign]
        client = Client(llm, "r")
        llm.say("r", chunk(1))
        await turns()
        client.task.cancel()
        await turns()
        assert guards.num_requests == 1
        may_close.set()
        await asyncio.wait({client.task})
        assert guards.num_requests == 0

    on_guards(check)


def test_an_abort_while_the_request_is_tokenized_is_not_lost() -> None:
    """vLLM itself knows nothing of it yet."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        llm.tokenized.clear()
        client = Client(llm, "cmpl-r-0")
        await turns()
        assert await abort(["r"]) == Aborted(0, 1, 0)
        llm.tokenized.set()
        llm.say("cmpl-r-0", chunk(1))
        await client.task
        assert (llm.aborted, client.finishes) == (["cmpl-r-0-1"], [None, "abort"])

    on_guards(check)


def test_a_client_that_goes_away_ends_its_request_at_once() -> None:
    """As in vLLM; one abort."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        client = Client(llm, "r")
        await turns()
        client.task.cancel()
        await asyncio.wait({client.task})
        assert (llm.aborted, llm.closed) == (["r-1"], ["r"])

    on_guards(check)


def test_where_blocks_come_from_elsewhere_also_a_client_that_goes_away_waits_for_the_first_token() -> None:
    """SCENARIOS 29: nobody reads it any more; it is guarded until then, and closed by one abort."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        client = Client(llm, "r")
        await turns()
        client.task.cancel()
        await asyncio.wait({client.task})
        assert (llm.aborted, llm.closed, guards.num_requests) == ([], [], 1)
        assert await abort(["r"]) == Aborted(0, 0, 0)
        llm.say("r", chunk())
        await turns()
        assert llm.aborted == []
        llm.say("r", chunk(1))
        await turns()
        assert (llm.aborted, llm.closed) == (["r-1"], ["r"])

    on_guards(check, defers_disconnects=True)


def test_closing_ends_what_waits_for_nobody() -> None:
    """A server that stops isn't held up by a first token that never comes."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        client = Client(llm, "r")
        await turns()
        client.task.cancel()
        await asyncio.wait({client.task})
        await guards.aclose()
        assert (llm.aborted, llm.closed) == (["r-1"], ["r"])

    on_guards(check, defers_disconnects=True)


def test_an_abort_of_all_closes_the_entrance_and_counts_what_is_left() -> None:
    """What has tokens is gone, what has none is reported; a request that comes meanwhile waits, and is left alone."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        running, waiting = Client(llm, "a"), Client(llm, "b")
        llm.say("a", chunk(1))
        await turns()
        began_s = asyncio.get_running_loop().time()
        aborting = asyncio.ensure_future(abort(None))
        await turns()
        late = Client(llm, "c")
        llm.say("c", chunk(1))
        await turns()
        assert late.outputs == []
        assert await aborting == Aborted(1, 1, 1)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(DRAIN_S, abs=0.1)
        await turns()
        assert len(late.outputs) == 1
        llm.say("c", chunk(2, finish="length"))
        llm.say("b", chunk(1))
        for client in (running, waiting, late):
            await client.task
        assert (running.finishes[-1], waiting.finishes[-1], late.finishes[-1]) == ("abort", "abort", "length")

    on_guards(check)


def test_an_abort_of_all_that_drains_does_not_wait_longer() -> None:
    """Zero left, at once."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        client = Client(llm, "a")
        llm.say("a", chunk(1))
        await turns()
        began_s = asyncio.get_running_loop().time()
        assert await abort(None) == Aborted(1, 0, 0)
        assert asyncio.get_running_loop().time() - began_s < 0.1
        assert await abort(None) == Aborted(0, 0, 0)
        await client.task

    on_guards(check)


def test_an_engine_that_refuses_the_abort_can_be_asked_again() -> None:
    """The entrance is open afterwards, and the guard as it was."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        client = Client(llm, "a")
        llm.say("a", chunk(1))
        await turns()

        async def broken(_: list[str]) -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await guards.abort(None, broken)
        await asyncio.wait_for(guards.admitted(), 0.1)
        assert await abort(None) == Aborted(1, 0, 0)
        await client.task

    on_guards(check)


# --- the entrance


class App:
    """Stands for vLLM's application: tokenizes, then generates each prompt of the request."""

    def __init__(self, llm: Llm, names: list[str]) -> None:
        self.llm = llm
        self.names = names
        self.tokenized = asyncio.Event()
        self.outputs: list[Any] = []
        self.middleware: Any = None

    def add_middleware(self, cls: Any, **options: Any) -> None:
        self.middleware = cls(self._serve, **options)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        await self.tokenized.wait()
        # As a streaming response does: in a task of its own.
        await asyncio.gather(*(self._one(name) for name in self.names))

    async def _one(self, name: str) -> None:
        async for output in self.llm.generate("prompt", None, name):
            self.outputs.append(output)

    def request(self, path: str = "/v1/completions", request_id: str | None = "r") -> "asyncio.Task[None]":
        headers = [] if request_id is None else [(b"x-request-id", request_id.encode())]
        scope = {"type": "http", "path": path, "headers": headers}
        return asyncio.get_running_loop().create_task(self.middleware(scope, None, None))


@pytest.mark.parametrize("ids", [["r"], None], ids=["by its id", "all"])
def test_an_abort_before_the_engine_has_heard_of_the_request_is_not_lost(ids: list[str] | None) -> None:
    """By the id that the client gave: each of its prompts ends at its first token."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        app = App(llm, ["cmpl-r-0", "cmpl-r-1"])
        guards.attach(app)
        handling = app.request()
        await turns()
        assert guards.num_requests == 1
        assert (await abort(ids)).num_deferred == 1
        app.tokenized.set()
        await turns()
        assert guards.num_requests == 2
        assert llm.aborted == []
        for name in app.names:
            llm.say(name, chunk(1))
        await handling
        assert sorted(llm.aborted) == ["cmpl-r-0-1", "cmpl-r-1-1"]

    on_guards(check)


def test_a_request_that_has_become_the_engine_s_counts_once() -> None:
    """Not once for HTTP and once for vLLM."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        app = App(llm, ["cmpl-r-0"])
        guards.attach(app)
        app.tokenized.set()
        handling = app.request()
        await turns()
        assert guards.num_requests == 1
        assert await abort(["r"]) == Aborted(0, 1, 0)
        llm.say("cmpl-r-0", chunk(1))
        await handling

    on_guards(check)


def test_the_entrance_holds_what_comes_during_an_abort_of_all() -> None:
    """Other routes (health, metrics) go on."""

    async def check(guards: Guards, llm: Llm, abort: Any) -> None:
        app = App(llm, [])
        guards.attach(app)
        app.tokenized.set()
        first = Client(llm, "a")
        await turns()
        aborting = asyncio.ensure_future(abort(None))
        await turns()
        handling, health = app.request(), app.request("/health")
        await turns()
        assert health.done()
        assert not handling.done()
        await aborting
        await handling
        llm.say("a", chunk(1))
        await first.task

    on_guards(check)


def test_a_server_that_is_off_the_bus_has_no_guards() -> None:
    """Until the engine is wrapped the entrance lets everything through."""

    async def main() -> None:
        guards, llm = Guards(), Llm()
        app = App(llm, [])
        guards.attach(app)
        handling = app.request(next(iter(GUARDED_PATHS)))
        await turns()
        assert guards.num_requests == 0
        app.tokenized.set()
        await handling

    run(main())


@pytest.mark.parametrize(
    ("external", "asked", "expected"),
    [
        ("r", "r", True),
        ("cmpl-r-0", "r", True),
        ("cmpl-r-0", "r-0", True),
        ("cmpl-r-0", "cmpl-r-0", True),
        ("chatcmpl-r", "r", True),
        ("cmpl-r-0", "x", False),
        ("other-r-0", "r", False),
    ],
)
def test_a_request_is_named_as_its_client_named_it(external: str, asked: str, expected: bool) -> None:
    """vLLM's own names work too."""
    assert is_named(external, [asked]) is expected
