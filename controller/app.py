"""The controller as a process: connect, serve, stop within a bound."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.controller.service import Controller, Settings

_log = logging.getLogger("rlbus.controller")

# What closing the connection may take beside stopping the ops, in seconds. Source: rlbus._transport, `aclose`.
CLOSE_S = 5.0


async def serve(
    config: BusConfig,
    *,
    settings: Settings | None = None,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[Controller], None] | None = None,
) -> None:
    """Run the controller of `config.namespace` until SIGTERM, SIGINT, or `stop` is set.

    A running op is taken back first: an update is undone like any cancelled one. All of the stop takes at most
    `settings.stop_s` + CLOSE_S. A second signal drops what is being undone. `on_ready` is called once requests are
    taken.

    Raises:
        BrokenError: no server, wrong credentials, or no answer within `config.connect_s`.
        ConfigError: a setting is wrong.
    Cancel: stops as a signal does.
    """
    stopping = asyncio.Event() if stop is None else stop
    async with await connect_bus(config, name="rlbus-controller") as bus:
        controller = Controller(bus, config.namespace, settings=settings)
        running = asyncio.get_running_loop().create_task(controller.run(), name="controller")
        with _Signals(stopping, running):
            waiting = asyncio.get_running_loop().create_task(stopping.wait())
            try:
                await asyncio.sleep(0)  # its first turn subscribes
                await bus.barrier(CLOSE_S)
                _log.info("controller of namespace %s serves, term %d", config.namespace, controller.term)
                if on_ready is not None:
                    on_ready(controller)
                await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                running.cancel()
                await asyncio.wait({running, waiting})
    if not running.cancelled():
        running.result()  # what broke it, for whoever started it


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
