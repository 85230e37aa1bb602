"""The surface as a server of its own, for workers that have no server to be in."""

import contextlib
from collections.abc import AsyncIterator

from rlbus._http_server import HttpServer, base_url
from rlbus.workers.addresses import reachable_host
from rlbus.workers.system.app import Door, make_app
from rlbus.workers.system.calls import Provider
from rlbus.workers.system.settings import SystemConfig
from rlbus.workers.system.surfaces import all_endpoints


@contextlib.asynccontextmanager
async def served(config: SystemConfig, provider: Provider, bus_url: str) -> AsyncIterator[str | None]:
    """Serve while inside; yields the URL to announce, None if there is to be no surface.

    Raises: ConfigError: it can't be bound. DeadlineError: it didn't start. Cancel: the server is stopped.
    """
    if not config.is_on:
        yield None
        return
    door = Door(provider, () if config.token is None else (config.token,))
    server = HttpServer(config.host, config.port)
    try:
        await server.start(make_app(all_endpoints(door), door))
        yield base_url(reachable_host(config.host, config.advertise_host, bus_url), server.port)
    finally:
        await server.aclose()
