"""The controller as a process: connect, serve, stop within a bound."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.connecting import connect_bus, kv_there, open_kv, open_objects
from rlbus.controller.leader import leader_of
from rlbus.controller.reign import announce, reign
from rlbus.controller.service import Controller, Settings
from rlbus.errors import ConfigError
from rlbus.schemas import Lease

if TYPE_CHECKING:
    from rlbus.controller.http.config import HttpConfig

# What closing the connection may take beside stopping the ops, in seconds. Source: rlbus._transport, `aclose`.
CLOSE_S = 5.0


async def serve(
    config: BusConfig,
    *,
    settings: Settings | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[Controller], None] | None = None,
    on_standby: Callable[[Lease], None] | None = None,
    is_single: bool = False,
    http: "HttpConfig | None" = None,
    on_http: Callable[[str], None] | None = None,
) -> None:
    """Run a controller of `config.namespace` until SIGTERM, SIGINT, or `stop` is set.

    It leads, or stands by while another one does, which `on_standby` is told. A running op is taken back first: an
    update is undone like any cancelled one. All of the stop takes at most `settings.stop_s` + CLOSE_S. A second signal
    drops what is being undone. `on_ready` is called once requests are taken, each time that it begins to lead.
    `is_single`: without lease and journal, for a server without JetStream; of others, only one with a lease is noticed.
    `http`: also listen there; `on_http` is told the base URL, before anything else. None: no HTTP.

    Raises:
        BrokenError: no server, wrong credentials, or no answer within `config.connect_s`; `is_single`, and it can't
            be told whether somebody leads by a lease, as the server's store is away or silent.
        ConfigError: a setting is wrong, the server has no JetStream, `http` can't listen where it is told to, or
            `is_single` and somebody leads by a lease.
    Cancel: stops as a signal does.
    """
    stopping = asyncio.Event() if stop is None else stop
    async with (
        await connect_bus(config, name="rlbus-controller") as bus,
        _http_side(bus, config.namespace, http, on_http),
    ):
        if is_single:
            await _check_alone(bus, config.namespace)
            serving = _serve_single(bus, config.namespace, settings, on_ready)
        else:
            kv = await open_kv(bus, config.namespace)
            serving = reign(
                bus,
                kv,
                config.namespace,
                name=f"{socket.gethostname()}/{os.getpid()}",
                settings=settings,
                on_ready=on_ready,
                on_standby=on_standby,
            )
        running = asyncio.get_running_loop().create_task(serving, name="controller")
        with _Signals(stopping, running):
            waiting = asyncio.get_running_loop().create_task(stopping.wait())
            try:
                await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                running.cancel()
                await asyncio.wait({running, waiting})
    if not running.cancelled():
        running.result()  # what broke it, for whoever started it


@contextlib.asynccontextmanager
async def _http_side(
    bus: Bus, namespace: str, http: "HttpConfig | None", on_http: Callable[[str], None] | None
) -> AsyncIterator[None]:
    if http is None:
        yield
        return
    from rlbus.controller.http.app import serving  # not for those who want none: it costs a web framework

    async with serving(bus, namespace, http) as url:
        if on_http is not None:
            on_http(url)
        yield


async def _check_alone(bus: Bus, namespace: str) -> None:
    kv = kv_there(bus, namespace)
    try:
        leader = await leader_of(kv)
    finally:
        kv.close()
    if leader is not None:
        problem = f"{leader.name} leads there by a lease; stop it, or start this one without --single, to stand by"
        raise ConfigError("--single in namespace", namespace, problem)


async def _serve_single(
    bus: Bus, namespace: str, settings: Settings | None, on_ready: Callable[[Controller], None] | None
) -> None:
    controller = Controller(bus, namespace, settings=settings, objects=open_objects(bus, namespace))
    announcing = asyncio.get_running_loop().create_task(announce(controller, bus, on_ready))
    try:
        await controller.run()
    finally:
        announcing.cancel()
        await asyncio.wait({announcing})


class _Signals(contextlib.AbstractContextManager[None]):
    """First SIGTERM or SIGINT sets `stopping`; a second one cancels `running` once more."""

    def __init__(self, stopping: asyncio.Event, running: asyncio.Task[None]) -> None:
        self._stopping = stopping
        self._running = running
        self._handled: list[signal.Signals] = []

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(
                NotImplementedError, RuntimeError, ValueError
            ):  # no main thread: `stop` is the way
                loop.add_signal_handler(number, self._on_signal)
                self._handled.append(number)

    def __exit__(self, *_exc: object) -> None:
        for number in self._handled:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._running.cancel()
        self._stopping.set()
