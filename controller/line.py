"""The controller's line to the workers: fan-outs under its term, with what the registry knows."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rlbus.bus import Bus
from rlbus.controller.answers import StepAnswer, answer_of
from rlbus.controller.learning import status_after
from rlbus.controller.limits import HOUSEKEEPING_S, within
from rlbus.controller.patience import Patience
from rlbus.controller.registry import Registry
from rlbus.fanout import Gathered, Limits, Losses, fanout
from rlbus.schemas import QUERY_ROUTES, CommandBody, WorkerAnswer, WorkerId, route_of


class Line:
    """Fan-outs of one controller. `losses` hears of workers that die meanwhile."""

    def __init__(self, bus: Bus, namespace: str, term: int, registry: Registry) -> None:
        self.bus = bus
        self.namespace = namespace
        self.term = term
        self.registry = registry
        self.losses = Losses()

    async def ask(
        self,
        body: CommandBody,
        workers: Sequence[WorkerId],
        *,
        op_id: str,
        limits: Limits,
        housekeeping_s: float = HOUSEKEEPING_S,
        is_wanted: Callable[[], bool] = lambda: True,
        on_answer: Callable[[WorkerId, WorkerAnswer], None] | None = None,
        on_outcome: Callable[[WorkerId, StepAnswer], None] | None = None,
    ) -> dict[WorkerId, StepAnswer]:
        """One command to `workers`; one answer each. Who does something of its own then is asked again (`patience`),
        for `housekeeping_s` at most and as long as it `is_wanted`. Raises and Cancel: as `rlbus.fanout.fanout`.

        Mutations always carry the list of who is meant: a worker that we don't know yet must not be paused by a
        broadcast that nobody would undo on it.
        """
        answers: dict[WorkerId, StepAnswer] = {}
        everybody = self.registry.num_in_components() if route_of(body) in QUERY_ROUTES else None

        def tell(worker: WorkerId, answer: StepAnswer) -> None:
            answers[worker] = answer
            if on_outcome is not None:
                on_outcome(worker, answer)

        def take(gathered: Gathered) -> None:
            self._learn(body, gathered)
            answer = answer_of(gathered)
            if not patience.takes(gathered.worker, answer):
                tell(gathered.worker, answer)

        def fan_out(asked: Sequence[WorkerId], limits: Limits) -> Coroutine[Any, Any, object]:
            return fanout(
                self.bus,
                self.namespace,
                body,
                members=asked,
                op_id=op_id,
                term=self.term,
                limits=limits,
                everybody=everybody,
                boots={w: m.boot_id for w in asked if (m := self.registry.get(w)) is not None},
                lost=self.losses,
                on_answer=on_answer,
                on_outcome=take,
            )

        def ask_again(asked: Sequence[WorkerId], left_s: float) -> Coroutine[Any, Any, object]:
            return fan_out(asked, within(limits, left_s))

        patience = Patience(limits.deadline_s, housekeeping_s, is_wanted, ask_again, tell)
        try:
            await fan_out(workers, limits)
            await patience.end()
        finally:
            await patience.aclose()
        return {worker: answers[worker] for worker in dict.fromkeys(workers)}

    def _learn(self, body: CommandBody, gathered: Gathered) -> None:
        member, result = self.registry.get(gathered.worker), gathered.result
        if result is None and gathered.fault is not None and gathered.fault.detail.get("heard_by") == "nobody":
            self.registry.unheard(gathered.worker)
        if member is None or result is None:
            return
        status = status_after(member.status, body, result, self.bus.clock.now())
        if status is not member.status:
            self.registry.learn(member.worker, result.boot_id, status, result.seq)
