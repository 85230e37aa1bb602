"""The sidecar as a process: join the bus, adopt what the sources list, until told to stop."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.errors import ConfigError
from rlbus.workers.config import AgentConfig
from rlbus.workers.disk import warn_of_absent
from rlbus.workers.dynamo.adoption import Adopting, Adoption, Discovery, Source, StaticUrl
from rlbus.workers.dynamo.copies import sweep
from rlbus.workers.dynamo.engine import EngineOptions
from rlbus.workers.peer_http import Peer
from rlbus.workers.supervisor.beats import Beats
from rlbus.workers.supervisor.supervise import stop_signal
from rlbus.workers.system.settings import SystemConfig

_log = logging.getLogger("rlbus.workers")


@dataclass(frozen=True, slots=True)
class Where:
    """Where Dynamo's workers are found: `discovery` are frontends with their RL port, `system_urls` workers.

    The credentials go to the hosts of these, and to `trusted_hosts`; any other that a frontend announces gets none.

    `component` is the part of the frontends' fleet that is meant, and that of a worker which doesn't say its own.
    """

    discovery: Sequence[str] = ()
    system_urls: Sequence[str] = ()
    component: str | None = None
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    trusted_hosts: Sequence[str] = ()

    def peer(self, url: str) -> Peer:
        """A URL, with the credentials if its host is one that the user has named. Raises ConfigError."""
        peer = Peer.of(url, api_key=self.api_key, headers=self.headers)
        named = {Peer.of(given).host for given in (*self.discovery, *self.system_urls)}
        if not peer.headers or peer.host in named | {host.strip("[]").lower() for host in self.trusted_hosts}:
            return peer
        _log.warning("%s was announced, and gets no credentials; --trust-host %s if it should", peer.url, peer.host)
        return Peer.of(url)

    def sources(self) -> list[Source]:
        """One for each URL.

        Raises:
            ConfigError: a URL can't be one, is there twice, or there is none.
        """
        urls = [self.peer(url).url for url in (*self.discovery, *self.system_urls)]
        twice = next((url for i, url in enumerate(urls) if url in urls[:i]), None)
        if twice is not None:
            raise ConfigError("url", twice, "it is given twice")
        if not urls:
            raise ConfigError("--discovery", None, "name the RL port of a Dynamo front end, or a worker's --url")
        found: list[Source] = [Discovery(self.peer(url), self.component) for url in self.discovery]
        return [*found, *(StaticUrl(self.peer(url), self.component) for url in self.system_urls)]


def checked_system(config: SystemConfig) -> SystemConfig:
    """The surface of each adopted worker. Raises: ConfigError: one port for all of them, which only one could have."""
    if config.port > 0:
        problem = "each adopted worker has a surface on a port of its own; use 0 for free ones, or -1 for none"
        raise ConfigError("system_port", config.port, problem)
    return config


async def serve(
    bus_config: BusConfig,
    where: Where,
    *,
    config: AgentConfig | None = None,
    options: EngineOptions | None = None,
    system: SystemConfig | None = None,
    on_ready: Callable[[], None] = lambda: None,
    on_change: Callable[[str], None] = lambda text: None,
) -> None:
    """Adopt until SIGTERM or SIGINT. The CLI calls it, on the main thread. Under a supervisor it gives signs of life.

    Args:
        system: the HTTP surface that each worker has, with a port of its own; None takes the environment's.
        on_ready: called once the bus is there; nobody need be adopted yet.
        on_change: hears who was adopted, who left, and who is left out.

    Raises:
        ConfigError: a URL or a setting is wrong. BrokenError: no bus.
    Cancel: everybody leaves, with a goodbye.
    """
    sources = where.sources()
    beats = Beats.from_env(os.environ)
    agent = AgentConfig.from_env() if config is None else config
    warn_of_absent(agent)
    how = Adopting(
        namespace=bus_config.namespace,
        # A worker that comes back within this process is another boot of it.
        agent=replace(agent, boot_id=None),
        peer_of=where.peer,
        options=EngineOptions() if options is None else options,
        system=checked_system(SystemConfig.from_env() if system is None else system),
        bus_url=bus_config.url,
        on_change=on_change,
    )
    try:
        async with await connect_bus(bus_config, name="rlbus-dynamo") as bus, stop_signal() as stopped:
            beating = None if beats is None else asyncio.get_running_loop().create_task(beats.run())
            try:
                on_ready()
                if beats is not None:
                    beats.ready()
                if agent.state_dir is not None:
                    await asyncio.to_thread(sweep, agent.state_dir, time.time())
                await Adoption(bus, sources, how).run(stopped)
            finally:
                if beating is not None:
                    beating.cancel()
    finally:
        for source in sources:
            await source.aclose()
