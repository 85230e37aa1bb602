"""What comes before an update's op: its source is read, and the controller is told, within the update's deadline."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.errors import BrokenError, DeadlineError, RLBusError, UnansweredError
from rlbus.schemas import ControlRequest, OpAccepted, PutManifestPage, TensorSpec, UpdateWeights
from rlbus.testing import LoopClock, MemoryBroker, hangs, run
from rlbus.trainer import Trainer
from tests.unit.rlbus.scripted_controller import NAMESPACE, SPECS, Controller, ScriptedPlane, Source, play

pytestmark = pytest.mark.unit

# A test that fails leaves no thread for longer, in real seconds.
LEFT_S = 30.0


class Asked(Source):
    """Notes who asks it for anything, and may hang."""

    def __init__(self, hangs: threading.Event | None = None) -> None:
        super().__init__(SPECS)
        self.threads: set[threading.Thread] = set()
        self._hangs = hangs

    def specs(self) -> tuple[TensorSpec, ...]:
        """What it has."""
        self.threads.add(threading.current_thread())
        if self._hangs is not None:
            with hangs():
                self._hangs.wait(LEFT_S)
        return super().specs()

    @property
    def is_shared(self) -> bool:
        """As one that has to look at all that it has."""
        self.threads.add(threading.current_thread())
        return False


def test_a_source_that_hangs_ends_its_update_at_the_deadline_and_keeps_no_process_alive() -> None:
    """The controller hears nothing of it, and the next update goes well beside it."""
    gate = threading.Event()
    hung = Asked(gate)

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        with pytest.raises(DeadlineError, match=r"update_weights did not end within 0\.1 s: the source still reads"):
            await trainer.update_weights(hung, version=1, deadline_s=0.1)
        assert controller.requests == []
        assert (await trainer.update_weights(Source(), version=1)).ok

    play(scenario)
    [thread] = hung.threads
    assert thread.daemon
    gate.set()
    thread.join(LEFT_S)


def test_a_source_is_asked_for_nothing_on_the_loop() -> None:
    """Whether it is shared may be as long a question as what it has: a lazy state dict reads all for it."""
    source = Asked()

    async def scenario(trainer: Trainer, _controller: Controller) -> None:
        assert (await trainer.update_weights(source, version=1)).ok

    play(scenario)
    assert threading.main_thread() not in source.threads


def silent(request: ControlRequest) -> bool:
    """A standby."""
    return False


def takes_manifests(request: ControlRequest) -> bool:
    """A controller that hangs once it knows what will be sent."""
    return isinstance(request, PutManifestPage)


def ended(answers: Callable[[ControlRequest], bool] | None, deadline_s: float) -> tuple[type[RLBusError], float]:
    """How an update ends, and after how long, with who answers some requests (None: nobody is there)."""

    async def body() -> tuple[type[RLBusError], float]:
        broker = MemoryBroker()
        async with Bus(broker.connect(), clock=LoopClock()) as theirs, Bus(broker.connect(), clock=LoopClock()) as ours:

            def on_request(request: ControlRequest, message: object) -> None:
                assert answers is not None
                reply = getattr(message, "reply", None)
                if answers(request) and reply is not None:
                    theirs.publish(reply, OpAccepted(op_id=request.op_id))

            if answers is not None:
                theirs.subscribe(subjects.all_control(NAMESPACE), ControlRequest, on_request)
            trainer = Trainer(ours, NAMESPACE, ScriptedPlane())
            with pytest.raises(RLBusError) as caught:
                await trainer.update_weights(Source(), version=1, deadline_s=deadline_s)
            assert caught.value.__cause__ is not caught.value
            return type(caught.value), asyncio.get_running_loop().time()

    return run(body())


@pytest.mark.parametrize("deadline_s", [1.0, 5.0])
def test_an_update_that_never_begins_ends_at_its_deadline(deadline_s: float) -> None:
    """However long an outage may be borne otherwise."""
    assert ended(None, deadline_s) == (BrokenError, deadline_s)
    assert ended(silent, deadline_s) == (UnansweredError, deadline_s)
    # It may have begun: taking it back has its 5 s.
    assert ended(takes_manifests, deadline_s) == (UnansweredError, deadline_s + 5.0)


def test_an_outage_is_borne_no_longer_for_a_long_deadline() -> None:
    """8 s without a controller, 40 s of silence."""
    assert ended(None, 600.0) == (BrokenError, 8.0)
    assert ended(silent, 600.0) == (UnansweredError, 40.0)


def test_an_op_has_what_the_manifest_has_left_of_the_deadline() -> None:
    """The controller counts from when it is asked; the user from the call."""

    async def body() -> list[float]:
        broker = MemoryBroker()
        found: list[float] = []
        async with Bus(broker.connect(), clock=LoopClock()) as theirs, Bus(broker.connect(), clock=LoopClock()) as ours:

            def on_request(request: ControlRequest, message: object) -> None:
                reply = getattr(message, "reply", None)
                if isinstance(request, UpdateWeights):
                    found.append(request.deadline_s)
                elif reply is not None and asyncio.get_running_loop().time() >= 3.0:
                    theirs.publish(reply, OpAccepted(op_id=request.op_id))

            theirs.subscribe(subjects.all_control(NAMESPACE), ControlRequest, on_request)
            with pytest.raises(UnansweredError):
                await Trainer(ours, NAMESPACE, ScriptedPlane()).update_weights(Source(), version=1, deadline_s=20.0)
        return found

    found = run(body())
    assert set(found) == {17.0}
