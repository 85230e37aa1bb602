"""Whether the core of a vLLM server answers: one question at a time, for as long as it takes."""

import asyncio
import logging
from typing import Any

_log = logging.getLogger("rlbus.workers")

# Between an answer and the next question. With PATIENCE_S, a beat and what the supervisor waits (HangLimits.seen_s, a
# look) a core that hangs is named within 2 s, which is what issue 3 asks for.
ASK_EVERY_S = 0.25
# From when on a question that has no answer says that the core doesn't answer. A step of a large batch may take longer;
# whether that is one is judged by the supervisor, from what the core's processes do meanwhile.
PATIENCE_S = 0.4


class Probe:
    """Asks an engine how it is. `answers` is what came of it last."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.answers = True

    async def run(self) -> None:
        """Ask until cancelled. A core that is inside a call that holds it, paused, counts as answering: that call has
        limits of its own. Cancel: at any point.
        """
        loop = asyncio.get_running_loop()
        asking: asyncio.Task[Any] | None = None
        try:
            while True:
                asking = loop.create_task(self._engine.observe())
                done, _ = await asyncio.wait({asking}, timeout=PATIENCE_S)
                if not done:
                    self.answers = False
                    await asyncio.wait({asking})
                self.answers = True
                if (error := asking.exception()) is not None:
                    _log.debug("the engine can't be observed: %s", error)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            if asking is not None:
                asking.cancel()
