"""The HTTP side of the torch engine: OpenAI's completions on loopback, errors in OpenAI's shape."""

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version as version_of
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlbus.errors import ClosedError, ConfigError, DeadlineError, EngineDeadError
from rlbus.workers.torch_lm.completions import BadRequestError, Body, Tokenizer, choice, parse
from rlbus.workers.torch_lm.generate import Finished, Generation, RequestError, UnknownModelError
from rlbus.workers.torch_lm.sampling import Sampling

# Largest body that is read.
MAX_BODY_BYTES = 16 << 20
START_S = 10.0
# How long open connections may take to end when the server is stopped; requests are aborted before.
STOP_S = 3.0
_BACKLOG = 1024


def make_app(generation: Generation, model: str, tokenizer: Tokenizer | None) -> Starlette:
    """The routes over one engine. `model` is the name that it is served under."""
    routes = _Routes(generation, model, tokenizer)
    return Starlette(
        routes=[
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/ping", routes.health),
            Route("/version", routes.version),
        ],
        exception_handlers={404: _no_route, 405: _no_method, 500: _internal},
    )


class _Routes:
    def __init__(self, generation: Generation, model: str, tokenizer: Tokenizer | None) -> None:
        self._generation = generation
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._ids = itertools.count(1)

    async def completions(self, request: Request) -> Response:
        """Generate; held while the engine is paused. A client that goes away aborts its requests."""
        try:
            data = await _read(request)
            body, sampling, prompts = parse(data, self._tokenizer)
            return await self._answer(request, body, sampling, prompts, self._adapter(body.model))
        except UnknownModelError as exc:
            return _error(404, exc.problem, "model")
        except BadRequestError as exc:
            return _error(400, exc.problem, exc.param)
        except RequestError as exc:
            return _error(400, exc.problem)
        except ClosedError as exc:
            return _error(503, str(exc))

    def _adapter(self, model: str | None) -> str | None:
        """The adapter that is asked for, with its revision, so that all of one call get the same."""
        if model in (None, self._model):
            return None
        assert model is not None
        loaded = self._generation.adapters.find(model)
        if loaded is None:
            raise UnknownModelError(f"the model {model!r} does not exist; the base model is {self._model!r}")
        return loaded.id

    async def _answer(
        self, request: Request, body: Body, sampling: Sampling, prompts: Sequence[list[int]], adapter: str | None
    ) -> Response:
        name = f"cmpl-{next(self._ids)}" if body.request_id is None else body.request_id
        finished = await _unless_gone(request, self._generate(name, body.n, sampling, prompts, adapter))
        if finished is None:
            return _error(499, "the client went away")
        if any(f.finish == "error" for f in finished):
            return _error(500, "the engine failed in a step; its log says why")
        asked = [prompt for prompt in prompts for _ in range(body.n)]
        choices = [
            choice(i, prompt, f, body, self._tokenizer)
            for i, (prompt, f) in enumerate(zip(asked, finished, strict=True))
        ]
        prompt_tokens = sum(len(prompt) for prompt in prompts)
        completion_tokens = sum(len(f.tokens) for f in finished)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return JSONResponse(
            {
                "id": name,
                "object": "text_completion",
                "created": int(time.time()),
                "model": self._model if adapter is None else adapter,
                "choices": choices,
                "usage": usage,
            }
        )

    async def _generate(
        self, name: str, n: int, sampling: Sampling, prompts: Sequence[list[int]], adapter: str | None
    ) -> list[Finished]:
        """All completions of one call; one that can't be taken ends the others."""
        tasks = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, (prompt, sample) in enumerate(itertools.product(prompts, range(n))):
                    seed = None if sampling.seed is None else _seed(sampling.seed + sample)
                    request_id = name if n * len(prompts) == 1 else f"{name}-{index}"
                    own = replace(sampling, seed=seed)
                    call = self._generation.generate(prompt, own, request_id=request_id, adapter=adapter)
                    tasks.append(group.create_task(call))
        except* (RequestError, ClosedError) as exc:
            raise exc.exceptions[0] from None
        return [task.result() for task in tasks]

    async def models(self, request: Request) -> Response:
        """The model, and every name that means an adapter of it now."""
        common = {"object": "model", "created": self._created, "owned_by": "rlbus"}
        entries: list[dict[str, Any]] = [{"id": self._model, **common}]
        entries += [{"id": name, **common, "parent": self._model} for name in self._generation.adapters.names()]
        return JSONResponse({"object": "list", "data": entries})

    async def health(self, request: Request) -> Response:
        """200 while the engine can generate (also when it is paused), else 503."""
        try:
            self._generation.check_alive()
        except EngineDeadError as exc:
            return _error(503, exc.fault.message)
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        """Of rlbus, and of the weights."""
        return JSONResponse({"version": version_of("rlbus"), "weight_version": self._generation.version})


def _seed(seed: int) -> int:
    """Kept within the 64 bits that torch takes."""
    return (seed + 2**63) % 2**64 - 2**63


async def _read(request: Request) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    async for part in request.stream():
        size_bytes += len(part)
        if size_bytes > MAX_BODY_BYTES:
            raise BadRequestError(f"the body has more than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(request: Request, call: Any) -> list[Finished] | None:
    """The result of `call`; None, and it is cancelled, if the client goes away first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(call)
    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return None
        result: list[Finished] = await working
        return result
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _error(status: int, message: str, param: str | None = None) -> Response:
    kind = "BadRequestError" if status == 400 else "NotFoundError" if status == 404 else "InternalServerError"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}, status_code=status
    )


async def _no_route(request: Request, exc: Exception) -> Response:
    return _error(404, f"there is no route {request.url.path}")


async def _no_method(request: Request, exc: Exception) -> Response:
    return _error(405, f"{request.method} is not allowed on {request.url.path}")


async def _internal(request: Request, exc: Exception) -> Response:
    return _error(500, "the server failed; its log says why")


class HttpServer:
    """Serves an app on a socket of its own. `start`, then `url`; `aclose` at the end."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base URL, with the real port. Valid after `start`."""
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self, app: Starlette) -> None:
        """Bind and serve.

        Raises: ConfigError: it can't be bound. DeadlineError: it didn't start. Cancel: `aclose` ends what began.
        """
        self._socket = await asyncio.to_thread(_bind, self._host, self._port)
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(STOP_S),
        )
        self._server = _Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        ready = asyncio.ensure_future(self._server.ready.wait())
        try:
            await asyncio.wait({self._serving, ready}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._serving.done():
            await self._serving
        if not self._server.ready.is_set():
            raise DeadlineError("starting the HTTP server", START_S)

    async def aclose(self) -> None:
        """Stop serving. Idempotent. Cancel: connections are cut."""
        serving, self._serving = self._serving, None
        try:
            if serving is not None and self._server is not None:
                self._server.should_exit = True
                _, pending = await asyncio.wait({serving}, timeout=STOP_S + 1.0)
                if pending:
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)
        finally:
            if self._socket is not None:
                self._socket.close()


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the process, and says when it serves."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready.set()


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        raise ConfigError("port", port, f"can't listen on {host}: {exc.strerror or exc}") from exc
    return listener
