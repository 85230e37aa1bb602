"""How simulated engines misbehave: a script whose steps are drawn as they are played."""

import random
from collections.abc import Callable

from rlbus.schemas import Fault, FaultCode
from rlbus.workers.engines.fake_script import Step
from tests.simulation.scenario import Scenario

_NUM_PARTS = 3
_FAILED = Fault(code=FaultCode.ENGINE_FAILED, message="drawn failure")
# The seconds that a slow call takes: a hiccup, longer than an ack limit, longer than most deadlines.
_SLOW_S = (0.3, 1.5, 8.0)


class DrawnScript:
    """Steps from the faults that the scenario allows, until it `is_calm`."""

    def __init__(self, scenario: Scenario, rng: random.Random, count: Callable[[str], None]) -> None:
        self.is_calm = False
        self._count = count
        self._scenario = scenario
        self._rng = rng

    def step(self, verb: str, call: int) -> Step:
        """The next step of `verb`."""
        if verb == "receive_weights":
            return self._transfer()
        if self.is_calm or verb in ("start", "check_manifest"):
            return Step()
        if self._happens("dying-engines", 0.2):
            return Step(dies=True)
        if self._happens("slow-verbs"):
            return Step(latency_s=self._rng.choice(_SLOW_S[:2] if verb == "observe" else _SLOW_S))
        if self._happens("failing-verbs"):
            return Step(fault=_FAILED)
        # A question that hangs is as good as one that is slow, which is drawn above.
        if verb != "observe" and self._happens("hanging-verbs"):
            return Step(hangs=True, clings_s=self._rng.choice((0.0, 0.0, 3.0)))
        return Step()

    def _transfer(self) -> Step:
        rng = self._rng
        transfer_s = rng.choice((0.0, 0.1, 1.0))
        if self.is_calm:
            return Step(num_parts=_NUM_PARTS, transfer_s=transfer_s)
        after = rng.randint(0, _NUM_PARTS)
        if self._happens("failing-transfers"):
            return Step(num_parts=_NUM_PARTS, transfer_s=transfer_s, fault=_FAILED, after_parts=after)
        if self._happens("hanging-transfers"):
            return Step(num_parts=_NUM_PARTS, transfer_s=transfer_s, hangs=True, after_parts=after)
        if self._happens("dying-engines"):
            return Step(num_parts=_NUM_PARTS, transfer_s=transfer_s, dies=True, after_parts=after)
        if self._happens("lying-transfers"):
            return Step(skips=True) if rng.random() < 0.5 else Step(wrong_sum_of="b")
        return Step(num_parts=_NUM_PARTS, transfer_s=transfer_s)

    def _happens(self, kind: str, part: float = 1.0) -> bool:
        if not self._scenario.has(kind):
            return False
        happens = self._rng.random() < self._scenario.engine_chance * part
        if happens:
            self._count(f"fault {kind}")
        return happens
