"""The demo's controller and workers as processes, each started again when it ends by itself (killed by hand, say)."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlbus._process import Child
from rlbus.errors import BrokenError

# How often the processes are looked at, in seconds.
LOOK_S = 0.5
# How often one of them is started again before the demo gives up.
MAX_RESTARTS = 20


@dataclass(slots=True)
class _Service:
    """One process: how it is started, and how often it was started again."""

    name: str
    argv: Sequence[str]
    child: Child
    num_restarts: int = 0


class Services:
    """Starts processes with `env`, logging into `folder`; `keep` them, then `stop`."""

    def __init__(self, env: Mapping[str, str], folder: Path) -> None:
        # Set when everything stands: before that, a process that ends is a mistake that a restart wouldn't mend.
        self.is_ready = False
        self._env = env
        self._folder = folder
        self._services: list[_Service] = []

    async def start(self, name: str, argv: Sequence[str]) -> None:
        """Start one more. Cancel: it isn't kept."""
        self._services.append(_Service(name, argv, await self._start(name, argv)))

    async def _start(self, name: str, argv: Sequence[str]) -> Child:
        return await Child.start(name, argv, env=self._env, log=self._folder / f"{name}.log")

    async def keep(self, on_restart: Callable[[str], None]) -> None:
        """Start again what ends, until cancelled; `on_restart` is told in words.

        Raises: BrokenError: one ended before everything stood, or once too often.
        Cancel: the way to stop it; what runs goes on.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            for service in self._services:
                if service.child.returncode is not None:
                    await self._restart(service, on_restart)

    async def _restart(self, service: _Service, on_restart: Callable[[str], None]) -> None:
        ended = f"ended with status {service.child.returncode}"
        if not self.is_ready or service.num_restarts >= MAX_RESTARTS:
            raise BrokenError(service.name, f"{ended}\n{service.child.log_tail()}")
        await service.child.stop()  # what it had started may live on
        service.num_restarts += 1
        service.child = await self._start(service.name, service.argv)
        on_restart(f"{service.name} {ended}, and was started again")

    async def stop(self) -> None:
        """End all of them at once. Cancel: they are killed."""
        await asyncio.gather(*(service.child.stop() for service in self._services))


def new_instance_id() -> str:
    """A worker's id, which it keeps when it is started again."""
    return str(secrets.randbits(64))
