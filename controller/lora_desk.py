"""All that one controller does about adapters, put together: requests, catch-ups, and what a leader before left."""

from rlbus._objects import Objects
from rlbus.bus import Bus
from rlbus.controller.desk import Desk
from rlbus.controller.frontend import Frontend
from rlbus.controller.line import Line
from rlbus.controller.lora_catch_up import LoraCatchUps
from rlbus.controller.lora_lists import LoraLists
from rlbus.controller.lora_takeover import LoraTakeOver
from rlbus.controller.loras import Loras
from rlbus.controller.op import Op
from rlbus.controller.succession import Succession
from rlbus.schemas import Fault, FleetView, JournalEntry, LoadLoraFleet, Report, UnloadLoraFleet

# Name of an op that gives workers an adapter that the fleet has.
CATCH_UP = "lora_catch_up"


class LoraDesk:
    """What `Controller` knows of adapters. Called on the loop; never waits. Arguments as `Loras`."""

    def __init__(
        self,
        bus: Bus,
        line: Line,
        desk: Desk,
        *,
        frontend: Frontend | None,
        succession: Succession | None,
        objects: Objects | None,
    ) -> None:
        self._line = line
        self._loras = Loras(bus, line, desk, frontend=frontend, succession=succession, objects=objects)
        self._lists = LoraLists(line)

        def begin(request: LoadLoraFleet) -> Fault | None:
            return self._loras.load(request, None, CATCH_UP)

        self._catch_ups = LoraCatchUps(bus, line.registry, desk, self._loras.book, self._lists, begin)
        if succession is not None:
            succession.settle_lora = self._settle

    def restore(self) -> None:
        """Know what the leader before knew. Called before anything begins."""
        self._loras.restore()

    def begin(self, request: LoadLoraFleet | UnloadLoraFleet, reply: str | None, name: str) -> Fault | None:
        """Begin an op that may begin now; why it isn't begun."""
        if isinstance(request, LoadLoraFleet):
            return self._loras.load(request, reply, name)
        return self._loras.unload(request, reply, name)

    def tick(self, now_s: float) -> None:
        """Give workers what they lack. Called several times a second."""
        self._catch_ups.tick(now_s)

    def explain(self, view: FleetView) -> FleetView:
        """The view, with the fleet's adapters and who lacks which."""
        return self._catch_ups.explain(view)

    async def aclose(self) -> None:
        """Ask nobody any more; ops are the desk's to end. Cancel: leaves nothing."""
        await self._lists.aclose()

    async def _settle(self, op: Op, entry: JournalEntry) -> Report:
        return await LoraTakeOver(op, self._line, self._line.registry, entry, self._loras).settle()
