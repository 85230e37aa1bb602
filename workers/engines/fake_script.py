"""What a fake engine is to do wrong, and when. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlbus.schemas import Fault, FaultCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How one call of one verb goes. The default is: at once, and well.

    `latency_s` passes before anything else. A transfer then brings its bytes in `num_parts` parts over `transfer_s`;
    after `after_parts` of them (0: before the first byte) it does what is scripted. `fault` raises it, `hangs` waits
    until the group is left, the session aborted or the call cancelled, `dies` kills the engine.
    """

    latency_s: float = 0.0
    fault: Fault | None = None
    hangs: bool = False
    dies: bool = False
    transfer_s: float = 0.0
    num_parts: int = 4
    after_parts: int = 0
    # Report a wrong checksum for this tensor.
    wrong_sum_of: str | None = None
    # Claim success without having received anything, as a server that answers 200 without a transfer.
    skips: bool = False
    # What the fault promises about the weights; None: the truth.
    claims_touched: bool | None = None
    # Do what is asked for, and only then what is scripted: the outcome is not the answer.
    does_it: bool = False
    # Don't let go when cancelled, for so many seconds.
    clings_s: float = 0.0


def failing(message: str = "scripted failure", code: FaultCode = FaultCode.ENGINE_FAILED, after_parts: int = 0) -> Step:
    """A call that fails; a transfer after so many of its four parts."""
    return Step(fault=Fault(code=code, message=message), after_parts=after_parts)


@dataclass(frozen=True, slots=True)
class FakeScript:
    """Steps by verb (`pause`, `resume`, `flush_cache`, `join_group`, `receive_weights`, `finish_update`, ...).

    Per verb a mapping from call number (1 is the first; 0 every call without an entry of its own) to a step.
    """

    steps: Mapping[str, Mapping[int, Step]] = field(default_factory=dict)

    def step(self, verb: str, call: int) -> Step:
        """The step of call number `call` of `verb`."""
        calls = self.steps.get(verb, {})
        return calls.get(call, calls.get(0, _WELL))


_WELL = Step()
