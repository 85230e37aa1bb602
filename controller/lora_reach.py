"""Which workers an adapter is meant for, also such as come later: all, some components, some workers, and exceptions
from each. Pure.

Invariant: two reaches are equal exactly if they mean the same workers, whoever may come; unions and differences are
exact.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from rlbus.schemas import FleetLora, Target, WorkerId, split_worker_id

NOBODY_NAMED: frozenset[WorkerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Reach:
    """`components` are meant unless all are, and the other way round; `workers` are meant unless their component is,
    and the other way round.
    """

    is_all: bool = False
    components: frozenset[str] = frozenset()
    workers: frozenset[WorkerId] = NOBODY_NAMED

    def __bool__(self) -> bool:
        """Whether it can mean anybody."""
        return self != NOBODY

    def __contains__(self, worker: WorkerId) -> bool:
        return self.has_component(component_of(worker)) != (worker in self.workers)

    def __or__(self, other: "Reach") -> "Reach":
        return self._with(other, lambda one, two: one or two)

    def __and__(self, other: "Reach") -> "Reach":
        return self._with(other, lambda one, two: one and two)

    def __sub__(self, other: "Reach") -> "Reach":
        return self._with(other, lambda one, two: one and not two)

    def has_component(self, component: str) -> bool:
        """Whether workers of it are meant that nothing else is said of."""
        return self.is_all != (component in self.components)

    def _with(self, other: "Reach", op: Callable[[bool, bool], bool]) -> "Reach":
        """Whom `op` says to be meant, of whether this one and the other one mean them."""
        is_all = op(self.is_all, other.is_all)
        are_meant = {c: op(self.has_component(c), other.has_component(c)) for c in self.components | other.components}
        workers = frozenset(
            w
            for w in self.workers | other.workers
            if op(w in self, w in other) != are_meant.get(component_of(w), is_all)
        )
        return Reach(is_all, frozenset(c for c, is_meant in are_meant.items() if is_meant != is_all), workers)


NOBODY = Reach()


def component_of(worker: WorkerId) -> str:
    """The component of a worker."""
    return split_worker_id(worker)[0]


def reach_of(target: Target) -> Reach:
    """Whom a target means: of one that names components and workers both."""
    if target.components is None and target.workers is None:
        return Reach(is_all=True)
    return Reach(components=frozenset(target.components or ())) | Reach(workers=frozenset(target.workers or ()))


def reach(lora: FleetLora) -> Reach:
    """Whom an adapter of the fleet is meant for."""
    components = Reach(components=frozenset(name for name in lora.not_on if "/" not in name))
    workers = Reach(workers=frozenset(WorkerId(name) for name in lora.not_on if "/" in name))
    return (reach_of(lora.target) - components - workers) | Reach(workers=frozenset(lora.also_on))


def reaching(lora: FleetLora, whom: Reach) -> FleetLora:
    """The adapter, meant for these. The reverse of `reach`."""
    taken = {w for w in whom.workers if whom.has_component(component_of(w))}
    added = _sorted(whom.workers - taken)
    if whom.is_all:
        return replace(lora, target=Target(), not_on=tuple(sorted({*whom.components, *taken})), also_on=added)
    if not whom.components:
        return replace(lora, target=Target(workers=added), not_on=(), also_on=())
    target = Target(components=tuple(sorted(whom.components)))
    return replace(lora, target=target, not_on=_sorted(taken), also_on=added)


def _sorted(workers: Iterable[WorkerId]) -> tuple[WorkerId, ...]:
    return tuple(sorted(workers))
