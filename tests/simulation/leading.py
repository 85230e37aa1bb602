"""A controller process of a simulated run: it leads when it gets the lease, and stands by when it doesn't."""

from rlbus._memory import NO_FAULTS, MemoryTransport
from rlbus.bus import Bus
from rlbus.codec import decode
from rlbus.controller.leader import LEASE_KEY
from rlbus.controller.reign import reign
from rlbus.controller.service import Controller, Settings
from rlbus.schemas import Lease, Version
from rlbus.testing import MemoryKv
from tests.simulation.parties import NAMESPACE, Process, TracedBroker, counted
from tests.simulation.scenario import Scenario
from tests.simulation.stopping import gated
from tests.simulation.truth import Truth

# How long a controller lets a group form, in seconds.
GROUP_TIMEOUT_S = 5.0
BUCKET = "state"


def holder_of(broker: TracedBroker, now_s: float) -> str | None:
    """The name of who has the lease in the store, whatever anybody believes."""
    bucket = broker.buckets.get(BUCKET)
    kept = None if bucket is None else bucket.kept.get(LEASE_KEY)
    if kept is None or (kept.ends_s is not None and now_s >= kept.ends_s):
        return None
    lease: Lease = decode(kept.entry.value, Lease, LEASE_KEY)
    return lease.name


class ControllerProcess(Process):
    """One life of a controller. The store has a connection of its own, so that it can fail apart from the bus."""

    def __init__(self, scenario: Scenario, truth: Truth, broker: TracedBroker, number: int) -> None:
        super().__init__(scenario, truth, broker, f"c{number}", scenario.skews_s[-1 - number % 2])
        self.store: MemoryTransport = broker.connect(f"{self.name}-store", faults=scenario.store_faults)
        gated(self.store, self.gate)
        counted(self.store, truth)
        # The controller that leads, or led last; None before the first time.
        self.controller: Controller | None = None
        self.seen_version: Version | None = None
        self._fence_off(self.bus)

    @property
    def is_leading(self) -> bool:
        """Whether its controller serves, in its own belief."""
        return self.is_running and self.controller is not None and not self.controller._desk._is_closing

    async def crash(self) -> None:
        """See Process."""
        self._broker.disconnect(self.store)
        await super().crash()

    async def stop(self) -> None:
        """End as it does when it is asked to (SIGTERM): what runs is taken back, the lease is released."""
        if not self.is_running or self._task is None:
            return
        self._truth.note(self.name, "is stopped")
        self._task.cancel()
        await self._wait_end()
        await self.crash()

    def lag(self, delay_s: tuple[float, float]) -> None:
        """See Process."""
        super().lag(delay_s)
        self.store.faults = self.transport.faults

    def unlag(self) -> None:
        """See Process."""
        super().unlag()
        self.store.faults = self._scenario.store_faults

    def calm(self) -> None:
        """See Process."""
        super().calm()
        self.store.faults = NO_FAULTS
        self._broker.heal(self.store)
        if self.is_running:
            self._broker.reconnect(self.store)

    def _fence_off(self, bus: Bus) -> None:
        """See every command that it sends while the store gives the lease to somebody else, or to nobody (I5)."""
        publish = self.transport.publish

        def watched(subject: str, data: bytes, reply: str | None = None) -> None:
            publish(subject, data, reply)
            if b'"term":' in data and b'"expires_at":' in data:
                leads = holder_of(self._broker, self._truth.now_s)
                if leads != self.name:
                    self._truth.broken("I5", f"{self.name} sent a command on {subject} while {leads or 'nobody'} leads")

        bus.transport.publish = watched  # type: ignore[method-assign]

    def _on_ready(self, controller: Controller) -> None:
        self.controller = controller
        self.seen_version = None
        self._truth.count("leaders")
        self._truth.note(self.name, f"leads, term {controller.term}")

    async def _serve(self) -> None:
        settings = Settings(group_timeout_s=GROUP_TIMEOUT_S)
        kv = MemoryKv(self.store, BUCKET)
        await reign(self.bus, kv, NAMESPACE, name=self.name, settings=settings, on_ready=self._on_ready)
