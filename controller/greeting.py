"""How a controller learns who is there: workers announce themselves on start, on change and every few seconds; a
controller that is new or was disconnected says hello, which every worker answers with an announcement.

A publish can't address "every component", so hello goes to the components that are known (those in the settings, and
each as soon as its first worker is heard); workers of a component that nobody named are found by their heartbeats,
within one interval.
"""

from collections.abc import Iterable

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.controller.op import publish
from rlbus.controller.op_ids import derive
from rlbus.schemas import Command, Hello, route_of

# How long a hello is worth answering, in seconds.
HELLO_S = 10.0


class Greeter:
    """Says hello to components for one controller. Called on the loop; never waits: an answer is an announcement."""

    def __init__(self, bus: Bus, namespace: str, term: int) -> None:
        self._bus = bus
        self._namespace = namespace
        self._term = term
        self._greeted: set[str] = set()
        self._num_hellos = 0

    def has_greeted(self, component: str) -> bool:
        """Whether hello was said to it before."""
        return component in self._greeted

    def greet(self, components: Iterable[str]) -> None:
        """Say hello to each, again if need be."""
        for component in dict.fromkeys(components):
            self._greeted.add(component)
            self._num_hellos += 1
            hello = Hello()
            command = Command(
                op_id=derive(self._bus.new_id(), f"hello-{self._num_hellos}"),
                term=self._term,
                expires_at=self._bus.clock.now() + HELLO_S,
                body=hello,
            )
            publish(self._bus, subjects.command(self._namespace, component, route_of(hello)), command)
