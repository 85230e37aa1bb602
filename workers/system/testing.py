"""For tests of surfaces: a worker on a bus in memory, its HTTP surface before it, and a client; without a socket."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rlbus.testing import run
from rlbus.workers.config import AgentConfig
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.system.app import Door, make_app
from rlbus.workers.system.surfaces import all_endpoints
from rlbus.workers.testing import Rig, worker_on_bus

SYSTEM_URL = "http://127.0.0.1:1"


@dataclass
class Front:
    """A worker, and a client of its surface."""

    rig: Rig
    client: httpx.AsyncClient
    door: Door

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """POST a JSON body; None sends none. Header names with `_` for `-`. Cancel: as a client that hangs up."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        given: dict[str, Any] = {} if body is None else {"json": body}
        return await self.client.post(path, headers=named, **given)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """GET. Cancel: as a client that hangs up."""
        return await self.client.get(path, headers={name.replace("_", "-"): v for name, v in headers.items()})


def on_surface(
    scenario: Callable[[Front], Coroutine[Any, Any, None]],
    steps: Mapping[str, Mapping[int, Step]] | None = None,
    *,
    config: AgentConfig | None = None,
    tokens: Sequence[str] = (),
    engine: FakeEngine | None = None,
) -> None:
    """Run a scenario against one worker with a scripted engine, in virtual time.

    Raises AssertionError also if the engine saw its contract violated.
    """
    used = FakeEngine(FakeScript({} if steps is None else steps)) if engine is None else engine

    async def main() -> None:
        async with worker_on_bus(used, config=config) as rig:
            door = Door(lambda: rig.agent, tokens)
            app = make_app(all_endpoints(door), door)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=SYSTEM_URL, timeout=3600.0) as client:
                await scenario(Front(rig, client, door))
        assert used.violations == []

    run(main())
