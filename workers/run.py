"""A worker as a process: join the bus, start the engine, serve until told to stop or the engine dies, leave nothing.

The order of the end matters: the agent says goodbye while the engine still stands, then the engine goes, then the
connection. Each step runs even if the one before failed, and each is bounded.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext

from rlbus.config import BusConfig
from rlbus.connecting import connect_bus
from rlbus.errors import DeadlineError, EngineDeadError
from rlbus.schemas import Fault, FaultCode
from rlbus.workers.agent import Agent
from rlbus.workers.config import AgentConfig, Identity
from rlbus.workers.disk import warn_of_absent
from rlbus.workers.engines.base import Engine
from rlbus.workers.ledger import opened
from rlbus.workers.supervisor.beats import Beats
from rlbus.workers.system.serving import served
from rlbus.workers.system.settings import SystemConfig

_log = logging.getLogger("rlbus.workers")

# How long an engine may take to start, in seconds; a large model from a slow disk takes minutes.
DEFAULT_START_S = 1800.0
# The engine contract says 10 s; more than that is a bug of the adapter, and the process goes anyway.
ENGINE_CLOSE_S = 15.0
# How often is looked whether the engine has died: well within the 2 s in which it is to be seen.
DEATH_POLL_S = 0.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(
    engine: Engine,
    bus_config: BusConfig,
    *,
    component: str | None = None,
    instance_id: str | None = None,
    config: AgentConfig | None = None,
    system: SystemConfig | None = None,
    start_s: float = DEFAULT_START_S,
    on_ready: Callable[[Agent], None] | None = None,
    handle_signals: bool = True,
) -> None:
    """Run one worker until SIGTERM or SIGINT, or until `agent.stop()`. The CLI and vLLM-less adapters call it.

    Under a supervisor (`rlbus worker ...`) it gives that signs of life from when the engine stands.

    Args:
        component, instance_id: who it is; None takes the environment's, or "backend" and a random id.
        system: its HTTP surface; None takes the environment's, or one on loopback with a free port.
        start_s: seconds that the engine may take to start.
        on_ready: called with the agent once it can be reached on the bus.
        handle_signals: False if somebody else owns the process.

    Raises:
        ConfigError: a name or a setting is wrong. BrokenError: no bus. DeadlineError: the engine didn't start in time.
        EngineError: it failed to. EngineDeadError: it died later; whoever supervises the process starts it again.
    Cancel: as a stop without the time to drain.
    """
    who = Identity.from_env(component=component, instance_id=instance_id)
    beats = Beats.from_env(os.environ)
    agent_config = AgentConfig.from_env() if config is None else config
    system_config = SystemConfig.from_env() if system is None else system
    warn_of_absent(agent_config)
    stop = _Stop()
    with _signals(stop) if handle_signals else nullcontext():
        try:
            async with AsyncExitStack() as stack:
                # Before the engine, which may load for minutes: a bus that can't be reached is told at once.
                name = f"worker-{who.component}-{who.instance_id}"
                bus = await stack.enter_async_context(await connect_bus(bus_config, name=name))
                stack.push_async_callback(_close, engine)
                await _start(engine, start_s)
                surface = served(system_config, lambda: stop.agent, bus_config.url)
                system_url = await stack.enter_async_context(surface)
                namespace = bus_config.namespace
                ledger = stack.enter_context(opened(agent_config.state_dir, namespace, who.component, who.instance_id))
                stop.agent = agent = Agent(
                    engine,
                    bus,
                    namespace=namespace,
                    component=who.component,
                    instance_id=who.instance_id,
                    config=agent_config,
                    ledger=ledger,
                    system_url=system_url,
                )
                await _run(agent, engine, beats, on_ready)
        except asyncio.CancelledError:
            if not stop.take_early():
                raise


async def _start(engine: Engine, start_s: float) -> None:
    try:
        async with asyncio.timeout(start_s):
            await engine.start()
    except TimeoutError as exc:
        raise DeadlineError("starting the engine", start_s) from exc


async def _run(agent: Agent, engine: Engine, beats: Beats | None, on_ready: Callable[[Agent], None] | None) -> None:
    async with asyncio.TaskGroup() as group:
        beating = None if beats is None else group.create_task(beats.run())
        watching = group.create_task(_stop_with(engine, agent))
        try:
            running = group.create_task(agent.run())
            await agent.ready.wait()
            descriptor = agent.descriptor
            _log.info("worker %s/%s serves %s", descriptor.component, descriptor.instance_id, descriptor.model)
            if on_ready is not None:
                on_ready(agent)
            if beats is not None:
                beats.ready()
            await running
        finally:
            watching.cancel()
            if beating is not None:
                beating.cancel()
    if agent.lost is not None:
        raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=agent.lost))


async def _stop_with(engine: Engine, agent: Agent) -> None:
    """Stop the agent when its engine dies."""
    while agent.lost is None:
        await asyncio.sleep(DEATH_POLL_S)
        try:
            async with asyncio.timeout(DEATH_POLL_S):
                await engine.observe()
        except EngineDeadError as exc:
            agent.lose(exc.fault.message)
        except Exception:  # noqa: BLE001 - the heartbeats show that it doesn't say how it is; it isn't dead by that
            continue


async def _close(engine: Engine) -> None:
    try:
        async with asyncio.timeout(ENGINE_CLOSE_S):
            await engine.aclose()
    except TimeoutError:
        _log.error("the engine did not close within %g s", ENGINE_CLOSE_S)


class _Stop:
    """What a signal does: stops the agent, or before there is one cancels the task that starts the engine."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self._task = asyncio.current_task()
        self._is_early = False

    def on_signal(self, name: str) -> None:
        if self.agent is not None:
            self.agent.stop(name)
        elif self._task is not None:
            self._is_early = True
            self._task.cancel()

    def take_early(self) -> bool:
        """Whether the cancellation was a signal's; then it is used up, and `serve` ends as after any stop."""
        if self._is_early and self._task is not None:
            self._task.uncancel()
        return self._is_early


@contextmanager
def _signals(stop: _Stop) -> Iterator[None]:
    """While inside, a signal stops the worker; a second one ends the process the default way."""
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        stop.on_signal(name)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
