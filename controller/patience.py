"""Waits for what workers do by themselves (an adapter that has drained goes, the lease of a pause has ended).

Nobody sent that, and it ends by itself, so no op fails because of it: who refuses a command for it is asked again,
under the same op id, beside all others, and only the last answer counts. Bounded by what the step allows, by its
deadline, and by whether anybody still wants it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rlbus.controller.answers import StepAnswer, unknown
from rlbus.controller.causes import fault
from rlbus.controller.limits import RETRY_S
from rlbus.errors import BrokenError, RLBusError
from rlbus.schemas import FaultCode, WorkerId

# A worker refuses a command again as it did before if it expires at the same moment, since that is a copy. Source:
# rlbus.workers.refusals. So each try expires earlier than the one before, by so many seconds.
APART_S = 0.001


class Patience:
    """Of one command to many workers. `ask` sends it to some, with so much time; `tell` takes an answer that counts.

    Nobody is asked again `housekeeping_s` after the begin, nor once `is_wanted` says no.
    """

    def __init__(
        self,
        deadline_s: float,
        housekeeping_s: float,
        is_wanted: Callable[[], bool],
        ask: Callable[[Sequence[WorkerId], float], Coroutine[Any, Any, object]],
        tell: Callable[[WorkerId, StepAnswer], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_wanted = is_wanted
        self._ask = ask
        self._tell = tell
        self._deadline_s = self._loop.time() + deadline_s
        self._until_s = self._loop.time() + min(deadline_s, housekeeping_s)
        # What was taken since the last round.
        self._held: dict[WorkerId, StepAnswer] = {}
        self._num_rounds = 0
        self._rounds: set[asyncio.Task[None]] = set()
        self._driver: asyncio.Task[None] | None = None

    def takes(self, worker: WorkerId, answer: StepAnswer) -> bool:
        """Whether this answer isn't the last: the worker is asked again. Called on the loop; never waits."""
        is_over = self._loop.time() + RETRY_S >= self._until_s or not self._is_wanted()
        if not answer.is_housekeeping or is_over:
            return False
        self._held[worker] = answer
        if self._driver is None:
            self._driver = self._loop.create_task(self._drive())
        return True

    async def end(self) -> None:
        """Until every answer that was taken has been replaced by one that counts. Cancel: `aclose` follows."""
        if self._driver is not None:
            await self._driver

    async def aclose(self) -> None:
        """Ask nobody any more; whoever isn't being asked has refused. Cancel: can't come but at its very end."""
        tasks = [t for t in (self._driver, *self._rounds) if t is not None]
        for task in tasks:
            task.cancel()
        held, self._held = self._held, {}
        for worker, answer in held.items():
            self._tell(worker, answer)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drive(self) -> None:
        while self._held or self._rounds:
            await asyncio.sleep(RETRY_S)
            held, self._held = self._held, {}
            if held and not self._is_wanted():
                for worker, answer in held.items():
                    self._tell(worker, answer)
            elif held:
                self._num_rounds += 1
                asking = self._loop.create_task(self._round(held))
                self._rounds.add(asking)
                asking.add_done_callback(self._rounds.discard)
        self._driver = None

    async def _round(self, held: dict[WorkerId, StepAnswer]) -> None:
        left_s = self._deadline_s - self._loop.time() - self._num_rounds * APART_S
        try:
            await self._ask(tuple(held), left_s)
        except BrokenError:  # nothing was sent: what they said before is the last that we know
            for worker, answer in held.items():
                if not self.takes(worker, answer):
                    self._tell(worker, answer)
        except RLBusError as exc:
            for worker in held:
                self._tell(worker, unknown(fault(FaultCode.INTERNAL, str(exc))))
