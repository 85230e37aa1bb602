"""An HTTP server on a socket of its own, within an event loop that somebody else runs. Used by workers and controllers.

Invariants: it is bound before it is announced, so the port is real; it leaves signals and logging alone.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from rlbus.errors import ConfigError, DeadlineError

START_S = 10.0
# How long open connections may take to end when the server is stopped; requests are aborted before.
STOP_S = 3.0
_BACKLOG = 1024
# A client whose machine is gone says nothing, not even that its connection ends: then the connection ends by itself
# after IDLE + COUNT * INTERVAL seconds (20 s), so that an op isn't kept up for nobody.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """The base URL of a host and port; IPv6 literals in brackets."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


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
        """Base URL, with the real port. Valid after `start`. For a wildcard it is none that others could use."""
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return base_url(host, port)

    @property
    def port(self) -> int:
        """The real port. Valid after `start`."""
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    async def start(self, app: Any) -> None:
        """Bind and serve an ASGI application.

        Raises: ConfigError: it can't be bound. DeadlineError: it didn't start. Cancel: `aclose` ends what began.
        """
        self._socket = await asyncio.to_thread(_bind, self._host, self._port)
        self._server = _Server(config_of(app))
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


def config_of(app: Any) -> uvicorn.Config:
    """How an application is served."""
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        # Or whoever connects from this machine says by X-Forwarded-For who it is, and that is who is audited.
        proxy_headers=False,
        timeout_graceful_shutdown=int(STOP_S),
    )


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
            # What it accepts has the same.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):  # not on every system
                    listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as exc:
        why = exc.strerror or str(exc)
        if isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("host", host, f"can't listen there: {why}") from exc
        raise ConfigError("port", port, f"can't listen on {host}: {why}") from exc
    return listener
