"""Requests of a vLLM server from arrival to end, so that an abort finds them, and waits for the right moment.

vLLM knows a request only once it is tokenized, and forgets an abort that comes before; and an abort between the
arrival and the first token can hit a KV transfer. So every request has a guard, from the first line of HTTP on:
an abort that comes before its first token is carried out at its first token, and at most once. A chunk without a token
(an error, say) is no first token. The guard goes when the generator behind it is closed, not earlier.

An abort of all closes the entrance first: what comes meanwhile waits, and belongs to the time after.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("rlbus.workers")

# How long an abort of all waits for what it ended to be gone, with the entrance closed, in seconds. vLLM ends an
# aborted request in milliseconds (facts/vllm-cpu.md 2); what waits for its first token may take longer: it's reported.
DRAIN_S = 1.0
# Where vLLM's `generate` takes the request's id (0.32).
REQUEST_ID_INDEX = 2
# Routes that generate (all of vLLM 0.32), whose requests are guarded from their arrival on.
GUARDED_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/cohere/v2/chat",
        "/inference/v1/generate",
        "/generative_scoring",
        "/invocations",
        "/v1/systemone",
    }
)

Abort = Callable[[str], Awaitable[None]]


@dataclass(eq=False, slots=True)
class Guard:
    """One request. `name` is vLLM's external id, or the X-Request-Id before vLLM has one (None: it has none)."""

    name: str | None
    has_token: bool = False
    # Somebody wants it ended; it is, at its first token.
    is_wanted: bool = False
    # The engine was told to end it.
    is_aborted: bool = False
    # Requests of the engine that it has become; then these count, and not it.
    num_parts: int = 0
    # Set when it is over.
    closed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Aborted:
    """What an abort came to: ended at once, to be ended at their first token, and in flight after it."""

    num_aborted: int
    num_deferred: int
    num_left: int


# The HTTP request that is being handled, in whichever task it is.
_arrived: ContextVar[Guard | None] = ContextVar("rlbus_arrived", default=None)


class Guards:
    """The guards of one API server. `wrap` the engine, `attach` to the application, before it serves.

    Args:
        defers_disconnects: whether also a client that goes away before its first token is ended at that token only
            (where an abort could hit a KV transfer), and not at once.
    """

    def __init__(self, *, defers_disconnects: bool = False) -> None:
        self.defers_disconnects = defers_disconnects
        # Nothing is guarded before.
        self.is_wrapped = False
        self._guards: set[Guard] = set()
        self._is_open = asyncio.Event()
        self._is_open.set()
        # Generators of clients that went away, on the way to their first token.
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def num_requests(self) -> int:
        """In flight, from arrival on."""
        return sum(guard.num_parts == 0 for guard in self._guards)

    def knows(self, name: str) -> bool:
        """Whether there is a guard for this external name."""
        return any(guard.name == name for guard in self._guards)

    def wrap(self, llm: Any) -> None:
        """Let every request of this AsyncLLM go through a guard: all of vLLM's routes call its `generate`."""
        inner = llm.generate

        async def abort(name: str) -> None:
            own = [key for key, state in llm.output_processor.request_states.items() if _is_of(state, name)]
            if own:
                await llm.abort(own, internal=True)

        def generate(*args: Any, **kwargs: Any) -> Any:
            name = kwargs["request_id"] if "request_id" in kwargs else args[REQUEST_ID_INDEX]
            return self._guarded(name, lambda: inner(*args, **kwargs), abort)

        llm.generate = generate
        self.is_wrapped = True

    def attach(self, app: Any) -> None:
        """Guard what comes to the OpenAI routes from its first line on. Called while the application is built."""
        app.add_middleware(_Entrance, guards=self)

    async def aclose(self) -> None:
        """End what still waits for a first token for nobody. Cancel: they are ended all the same."""
        for task in self._closing:
            task.cancel()
        if self._closing:
            await asyncio.wait(self._closing, timeout=DRAIN_S)

    async def abort(self, request_ids: Sequence[str] | None, abort: Callable[[list[str]], Awaitable[None]]) -> Aborted:
        """End those, or all; `abort` ends requests of these external names in the engine.

        Cancel: those that were to be ended at their first token still are; the entrance is open.
        """
        if request_ids is not None:
            meant = [g for g in self._guards if g.name is not None and is_named(g.name, request_ids)]
            return await self._abort(meant, abort)
        self._is_open.clear()
        try:
            meant = list(self._guards)
            done = await self._abort(meant, abort)
            await self._drained(meant)
            num_left = sum(not guard.closed.is_set() for guard in meant if guard.num_parts == 0)
            return Aborted(done.num_aborted, done.num_deferred, num_left)
        finally:
            self._is_open.set()

    async def _abort(self, meant: Iterable[Guard], abort: Callable[[list[str]], Awaitable[None]]) -> Aborted:
        now = [g for g in meant if g.has_token and not g.is_aborted]
        later = [g for g in meant if not g.has_token and not g.is_wanted and g.num_parts == 0]
        for guard in meant:
            guard.is_wanted = True
        for guard in now:
            guard.is_aborted = True
        try:
            if now:
                await abort([g.name for g in now if g.name is not None])
        except BaseException:
            for guard in now:
                guard.is_aborted = False
            raise
        return Aborted(len(now), len(later), 0)

    async def _drained(self, guards: Sequence[Guard]) -> None:
        waits = [asyncio.ensure_future(guard.closed.wait()) for guard in guards]
        if waits:
            await asyncio.wait(waits, timeout=DRAIN_S)
        for wait in waits:
            wait.cancel()

    # --- one request

    async def admitted(self) -> None:
        """Wait until the entrance is open: at most as long as one abort of all. Cancel: leaves nothing."""
        await self._is_open.wait()

    def arrive(self, name: str | None) -> Guard:
        """A request is here."""
        guard = Guard(name)
        self._guards.add(guard)
        return guard

    def leave(self, guard: Guard) -> None:
        """It is over. Idempotent."""
        self._guards.discard(guard)
        guard.closed.set()

    async def _guarded(self, name: str, make: Callable[[], Any], abort: Abort) -> AsyncIterator[Any]:
        """The outputs of one request of the engine, under a guard of its own: one HTTP request may make several."""
        arrived = _arrived.get()
        if arrived is None or arrived.closed.is_set():
            await self.admitted()
        guard = self.arrive(name)
        if arrived is not None:
            arrived.num_parts += 1
            # An abort that came while it was tokenized.
            guard.is_wanted = arrived.is_wanted
        inner = make()
        is_handed_over = False
        pending: asyncio.Task[Any] | None = None
        try:
            while not guard.has_token:
                # In a task of its own until the first token: a client that goes away doesn't cancel it.
                pending = asyncio.ensure_future(_next(inner))
                output = await asyncio.shield(pending)
                if output is _END:
                    return
                await self._look(guard, output, abort)
                pending = None
                yield output
            async for output in inner:
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            if self.defers_disconnects and not guard.has_token:
                is_handed_over = True
                self._close_later(guard, inner, pending)
            raise
        finally:
            if not is_handed_over:
                await self._close(guard, inner, pending)

    async def _look(self, guard: Guard, output: Any, abort: Abort) -> None:
        """At the first real token: whoever is to be ended is ended now, once."""
        if not _has_token(output):
            return
        guard.has_token = True
        if guard.is_wanted and not guard.is_aborted and not output.finished:
            guard.is_aborted = True
            assert guard.name is not None
            await abort(guard.name)

    async def _close(self, guard: Guard, inner: Any, pending: "asyncio.Task[Any] | None") -> None:
        try:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            await inner.aclose()
        finally:
            self.leave(guard)

    def _close_later(self, guard: Guard, inner: Any, pending: "asyncio.Task[Any] | None") -> None:
        guard.is_wanted = True
        task = asyncio.get_running_loop().create_task(self._until_token(guard, inner, pending))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _until_token(self, guard: Guard, inner: Any, pending: "asyncio.Task[Any] | None") -> None:
        """Nobody reads it any more: close it at its first token, by which vLLM ends it; or at its end."""
        try:
            while True:
                pending = asyncio.ensure_future(_next(inner)) if pending is None else pending
                output = await asyncio.shield(pending)
                pending = None
                if output is _END or _has_token(output):
                    return
        except Exception as exc:  # noqa: BLE001 - nobody waits for it; vLLM has logged why it ended
            _log.debug("request %s ended before its first token: %s", guard.name, exc)
        finally:
            await self._close(guard, inner, pending)


# What `_next` gives at the end: a StopAsyncIteration can't leave a task.
_END = object()


async def _next(inner: Any) -> Any:
    return await anext(inner, _END)


def _has_token(output: Any) -> bool:
    """Whether a chunk brings a token: one with an error alone doesn't."""
    return any(len(part.token_ids) > 0 and part.finish_reason != "error" for part in output.outputs)


def _is_of(state: Any, name: str) -> bool:
    return bool(state.external_req_id == name)


def is_named(external: str, request_ids: Sequence[str]) -> bool:
    """Whether an id of vLLM's frontend is meant: as it is, or as its OpenAI routes make it of an X-Request-Id."""
    if external in request_ids:
        return True
    kind, _, rest = external.partition("-")
    if kind == "cmpl":
        return rest in request_ids or rest.rpartition("-")[0] in request_ids
    return kind == "chatcmpl" and rest in request_ids


class _Entrance:
    """ASGI middleware: a guard for what comes to an OpenAI route, until vLLM's own requests have theirs."""

    def __init__(self, app: Any, guards: Guards) -> None:
        self._app = app
        self._guards = guards

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in GUARDED_PATHS or not self._guards.is_wrapped:
            await self._app(scope, receive, send)
            return
        await self._guards.admitted()
        name = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"x-request-id"), None)
        guard = self._guards.arrive(name)
        token = _arrived.set(guard)
        try:
            await self._app(scope, receive, send)
        finally:
            _arrived.reset(token)
            self._guards.leave(guard)
