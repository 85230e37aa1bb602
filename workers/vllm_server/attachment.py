"""An agent inside a vLLM API server: on the server's loop, from the moment that it serves until it stops.

Invariants: the server never waits for the bus; of several API server processes exactly the first has an agent; the
agent ends, with a goodbye, before the application does.
"""

import asyncio
import logging
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbus._http_server import base_url
from rlbus.config import BusConfig
from rlbus.errors import ConfigError, RLBusError
from rlbus.workers.addresses import advertised_host, reachable_host
from rlbus.workers.config import AgentConfig, Identity
from rlbus.workers.disk import warn_of_absent
from rlbus.workers.ledger import opened
from rlbus.workers.supervisor.beats import Beats
from rlbus.workers.vllm_server.probe import Probe
from rlbus.workers.vllm_server.surface import is_wanted, mount, token_of

_log = logging.getLogger("rlbus.workers")

# Pause between attempts to connect: doubled from the first to the last, in seconds, and up to half of it longer.
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
# How long the server's socket may take to listen once the application is up, and how often that is looked at.
LISTEN_S = 60.0
LISTEN_POLL_S = 0.02
# How often is looked whether the engine is beyond repair: well within the 2 s in which that is to be seen.
DEATH_POLL_S = 0.5
# How long the agent may take to stop. Source: AgentConfig.drain_s, release and undo of what still runs.
STOP_S = 20.0

# Parent of the private folder through which engine processes answer.
RUN_DIR = "RLBUS_RUN_DIR"
# Set by `rlbus worker vllm` in the environment of the server that it supervises.
SUPERVISED = "RLBUS_SUPERVISED"


@dataclass(frozen=True, slots=True)
class WorkerEnv:
    """What the environment says of a worker inside vLLM."""

    bus: BusConfig
    identity: Identity
    agent: AgentConfig
    advertise_host: str | None = None
    run_dir: str | None = None
    # A supervisor restarts the server when it ends.
    is_supervised: bool = False
    # Of the HTTP surface; and whether there is to be one.
    token: str | None = field(default=None, repr=False)
    has_surface: bool = True

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> "WorkerEnv | None":
        """Parse; None without RLBUS_URL, when the server shall stay off the bus.

        Raises:
            ConfigError: a value is wrong.
        """
        if not environ.get("RLBUS_URL"):
            return None
        return cls(
            bus=BusConfig.from_env(environ=environ),
            identity=Identity.from_env(environ=environ),
            agent=AgentConfig.from_env(environ=environ),
            advertise_host=advertised_host(environ),
            run_dir=environ.get(RUN_DIR) or None,
            is_supervised=environ.get(SUPERVISED) == "1",
            token=token_of(environ),
            has_surface=is_wanted(environ),
        )


class Attachment:
    """Runs the agent of one server. `start` once it is up, `aclose` before it goes."""

    def __init__(self, llm: Any, args: Any, env: WorkerEnv, guards: Any = None) -> None:
        self._llm = llm
        self._guards = guards
        if guards is not None:
            # Where a request may wait for blocks of another machine, nobody cuts it off before its first token.
            guards.defers_disconnects = llm.vllm_config.kv_transfer_config is not None
            guards.wrap(llm)
        self._args = args
        self._env = env
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._agent: Any = None
        self._is_mounted = False
        self._system_url: str | None = None
        # Under a supervisor: signs of life to it.
        self._beats = Beats.from_env(os.environ)

    @classmethod
    def from_env(
        cls, llm: Any, args: Any, environ: Mapping[str, str] | None = None, guards: Any = None
    ) -> "Attachment | None":
        """The attachment of this API server process, None if it is to have none; the log says why.

        `guards` (a `guards.Guards`) are those of the server's requests; they are wrapped around `llm`.

        Raises:
            ConfigError: a value in the environment is wrong.
        """
        env = WorkerEnv.parse(os.environ if environ is None else environ)
        if env is None:
            _log.warning("rlbus: RLBUS_URL is not set, so this server stays off the bus; a sidecar may put it there")
            return None
        parallel = llm.vllm_config.parallel_config
        index, count = parallel._api_process_rank, parallel._api_process_count
        if index != 0:
            _log.info("rlbus: API server %d of %d; the agent runs in the first one", index, count)
            return None
        return cls(llm, args, env, guards)

    def start(self, app: Any) -> None:
        """Begin to run the agent, on the running loop; before the server takes its first request."""
        env = self._env
        num_servers = self._llm.vllm_config.parallel_config._api_process_count
        self._is_mounted = env.has_surface and mount(app, self._args, env.token, num_servers, lambda: self._agent)
        self._task = asyncio.get_running_loop().create_task(self._run(app))

    async def aclose(self) -> None:
        """Stop the agent, which says goodbye. Idempotent, bounded by STOP_S. Cancel: the agent is cancelled."""
        self._stop.set()
        task, self._task = self._task, None
        if task is None:
            return
        try:
            _, pending = await asyncio.wait({task}, timeout=STOP_S)
            if pending:
                _log.error("rlbus: the agent did not stop within %g s", STOP_S)
        finally:
            task.cancel()

    @property
    def who(self) -> str:
        """The worker's name on the bus."""
        identity = self._env.identity
        return f"{identity.component}/{identity.instance_id}"

    async def _run(self, app: Any) -> None:
        from rlbus.workers.vllm_server.engine import VllmEngine

        identity, who = self._env.identity, self.who
        try:
            await self._until_listening(app)
            url = self._url(app)
            self._system_url = url if self._is_mounted else None
            models = getattr(app.state, "openai_serving_models", None)
            engine = VllmEngine(
                self._llm, completions_url=url, run_dir=self._env.run_dir, guards=self._guards, models=models
            )
            probe = Probe(engine)
            warn_of_absent(self._env.agent)
            tasks = [asyncio.ensure_future(probe.run())]
            if self._beats is not None:
                tasks.append(asyncio.ensure_future(self._beats.run(lambda: probe.answers)))
            try:
                await engine.start()
                with opened(
                    self._env.agent.state_dir, self._env.bus.namespace, identity.component, identity.instance_id
                ) as ledger:
                    await self._serve(engine, who, ledger)
            finally:
                for task in tasks:
                    task.cancel()
                await engine.aclose()
        except Exception:  # noqa: BLE001 - the server's log is where this is seen; the server itself goes on
            _log.exception("rlbus: worker %s ended; the server goes on without it", who)

    async def _serve(self, engine: Any, who: str, ledger: Any) -> None:
        """Connect and run the agent, again and again with growing pauses when that fails, until the server stops, or
        its engine is lost: then nobody needs a worker there.
        """
        retry_s = FIRST_RETRY_S
        while not self._stop.is_set() and (self._agent is None or self._agent.lost is None):
            try:
                await self._connect_and_host(engine, who, ledger)
                retry_s = FIRST_RETRY_S
            except ConfigError:
                raise
            except RLBusError as exc:
                _log.warning("rlbus: worker %s is not on the bus (%s); next try in about %.0f s", who, exc, retry_s)
            except Exception:  # noqa: BLE001 - a bug of ours; the log has it, and the worker is tried again
                _log.exception("rlbus: the agent of %s failed; next try in about %.0f s", who, retry_s)
            await self._stopped_within(retry_s * random.uniform(1.0, 1.5))
            retry_s = min(retry_s * 2, MAX_RETRY_S)

    async def _connect_and_host(self, engine: Any, who: str, ledger: Any) -> None:
        from rlbus.connecting import connect_bus
        from rlbus.workers.agent import Agent

        config, identity = self._env.bus, self._env.identity
        async with await connect_bus(config, name=f"worker-{identity.component}-{identity.instance_id}") as bus:
            # One that ended by itself has left the engine as it is, and the next one takes it over.
            self._agent = agent = Agent(
                engine,
                bus,
                namespace=config.namespace,
                component=identity.component,
                instance_id=identity.instance_id,
                config=self._env.agent,
                ledger=ledger,
                before=self._agent,
                system_url=self._system_url,
            )
            _log.info("rlbus: worker %s of namespace %s is on %s", who, config.namespace, config.url)
            await self._host(agent, engine)

    async def _host(self, agent: Any, engine: Any) -> None:
        """Run one agent until the server stops, or its engine can't be helped any more."""
        loop = asyncio.get_running_loop()
        running = loop.create_task(agent.run())
        stopping = loop.create_task(self._stop.wait())
        if self._beats is not None:
            self._beats.ready()
        try:
            is_told = False
            while not running.done():
                await asyncio.wait({running, stopping}, timeout=DEATH_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                if self._stop.is_set():
                    break
                death = engine.death or agent.lost
                if death is not None and not is_told:
                    is_told = True
                    self._on_death(death)
            agent.stop("the server stops")
            await running
        finally:
            stopping.cancel()
            running.cancel()

    def _on_death(self, why: str) -> None:
        """vLLM stops a server whose engine died by itself, but not one whose engine only rlbus knows to be lost."""
        if not self._env.is_supervised:
            _log.error("rlbus: %s", why)
            return
        _log.error("rlbus: %s; the server stops, to be started anew", why)
        signal.raise_signal(signal.SIGTERM)

    async def _stopped_within(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._stop.wait()
        except TimeoutError:
            return

    # --- where the server can be reached

    async def _until_listening(self, app: Any) -> None:
        """Wait until the server takes connections, so that the address that is announced answers."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + LISTEN_S
        while not getattr(getattr(app.state, "server", None), "started", False):
            if self._stop.is_set():
                return
            if loop.time() > ends_s:
                _log.warning("rlbus: the server doesn't listen after %g s; the worker joins the bus anyway", LISTEN_S)
                return
            await self._stopped_within(LISTEN_POLL_S)

    def _url(self, app: Any) -> str | None:
        """The base URL of the OpenAI routes; None for a Unix socket."""
        args = self._args
        if args.uds:
            return None
        host, port = args.host or "", args.port
        if port == 0:
            port = _bound_port(app)
            if port is None:
                _log.warning("rlbus: the port of this server can't be told, so no completions URL is announced")
                return None
        host = reachable_host(host, self._env.advertise_host, self._env.bus.url)
        scheme = "https" if args.ssl_keyfile and args.ssl_certfile else "http"
        return base_url(host, port, scheme)


def _bound_port(app: Any) -> int | None:
    """The port that the system gave to a server that was started with port 0."""
    for server in getattr(app.state.server, "servers", []):
        for sock in server.sockets:
            return int(sock.getsockname()[1])
    return None
