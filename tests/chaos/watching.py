"""Listens to the bus: what the controller says of the fleet, every SAMPLE_S, and every event; strikes when told to.

A blow falls in the callback of the message that it waits for, so nothing comes between.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlbus import subjects
from rlbus.bus import Bus
from rlbus.errors import DeadlineError, RLBusError
from rlbus.schemas import (
    ControllerEvent,
    FleetView,
    Generation,
    GenerationPaused,
    GenerationResumed,
    GetFleet,
    Liveness,
    MemberView,
    OpAdvanced,
    OpStarted,
    WeightsChanged,
    WeightsState,
    WorkerEvent,
)
from tests.chaos.promises import Standing, Torn

SAMPLE_S = 0.05
# One question; a controller that is gone doesn't answer.
ANSWER_S = 0.3
UPDATE = "update_weights"

Event = WorkerEvent | ControllerEvent
Trigger = Callable[["Watch"], bool]


@dataclass(frozen=True, slots=True)
class Sample:
    """The controller's word at one time (`time.monotonic`)."""

    at_s: float
    view: FleetView

    def member(self, worker: str) -> MemberView | None:
        """One worker, if it is known."""
        return next((m for m in self.view.members if m.worker == worker), None)

    def is_admitted(self, workers: Sequence[str], step: int) -> bool:
        """Whether all of them are, at that step."""
        return all(is_at(self.member(worker), step) for worker in workers)


def is_at(member: MemberView | None, step: int) -> bool:
    """Whether a worker is admitted, at that step."""
    version = None if member is None else member.status.weights.version
    return member is not None and member.admitted and version is not None and version.step == step


def false_admissions(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Workers that were admitted while not clean, or at another version than the fleet's."""
    found = set()
    for sample in samples:
        for member in sample.view.members:
            weights = member.status.weights
            if member.admitted and (weights.state is not WeightsState.CLEAN or weights.version != sample.view.version):
                found.add(f"{member.worker} {weights.state.value} {weights.version}")
    return tuple(sorted(found))


def torn_in(samples: Sequence[Sample]) -> tuple[Torn, ...]:
    """Workers that were dirty in any of them, and how they stood then; one that changed its story is there twice."""
    found: dict[Torn, None] = {}
    for sample in samples:
        for member in sample.view.members:
            weights = member.status.weights
            if member.liveness is not Liveness.ALIVE or weights.state is not WeightsState.DIRTY:
                continue
            last_good = None if weights.last_good is None else weights.last_good.step
            was_let_go = member.admitted or member.status.generation is Generation.RUNNING
            found[Torn(str(member.worker), last_good, was_let_go)] = None
    return tuple(found)


def standing_in(sample: Sample) -> dict[str, Standing]:
    """How each worker that lives stands in it."""
    return {
        str(m.worker): Standing(
            m.status.weights.state.value,
            None if m.status.weights.version is None else m.status.weights.version.step,
            m.status.generation is Generation.RUNNING,
        )
        for m in sample.view.members
        if m.liveness is Liveness.ALIVE
    }


def repeated(events: Sequence[Event]) -> tuple[str, ...]:
    """Steps that changed a worker twice."""
    seen: set[object] = set()
    found = []
    for event in events:
        if not isinstance(event, GenerationPaused | GenerationResumed | WeightsChanged) or event.op_id is None:
            continue
        what = (event.state, event.version) if isinstance(event, WeightsChanged) else None
        key = (event.component, event.instance_id, type(event), event.op_id, what)
        if key in seen:
            found.append(f"{event.op_id} on {event.component}/{event.instance_id}")
        seen.add(key)
    return tuple(found)


def _look_of(member: MemberView) -> str:
    status = member.status
    text = f"{member.worker} {member.liveness.value} {status.generation.value} {status.weights.state.value}"
    text += f" {status.weights.version} {'admitted' if member.admitted else member.reason}"
    return text if status.pause is None else f"{text} held by {status.pause.owner}"


class Watch:
    """Use as `async with`. `phase` is the one that the running update entered last."""

    def __init__(self, bus: Bus, namespace: str) -> None:
        self.samples: list[Sample] = []
        self.events: list[Event] = []
        self.phase = "none"
        self.done = 0
        self.is_held = False
        # The phase in which the brake holds the controller; None: it doesn't.
        self.held_in: str | None = None
        # When the blow fell (`time.monotonic`), and in which announced phase.
        self.struck_s: float | None = None
        self.struck_in = ""
        self._bus = bus
        self._namespace = namespace
        self._trigger: Trigger | None = None
        self._blow: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()
        self._op_ids: set[str] = set()
        self._came_s: list[float] = []

    async def __aenter__(self) -> "Watch":
        # The pattern matches the controller's events as well.
        self._subscription = self._bus.subscribe(subjects.all_worker_events(self._namespace), Event, self._on_event)
        self._sampling = asyncio.get_running_loop().create_task(self._sample())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._subscription.unsubscribe()
        self._sampling.cancel()
        await asyncio.wait({self._sampling})

    @property
    def op_ids(self) -> tuple[str, ...]:
        """Updates that were seen to begin."""
        return tuple(sorted(self._op_ids))

    def arm(self, trigger: Trigger, blow: Callable[[], None]) -> None:
        """Let `blow` fall as soon as `trigger` holds after some message."""
        self._trigger, self._blow = trigger, blow
        self._look()

    def on_braked(self, phase: str) -> None:
        """The controller waits in this phase of its update, before the command that the brake was armed for."""
        self.held_in = phase
        self._look()

    def on_held(self) -> None:
        """The trainer's source waits half way."""
        self.is_held = True
        self._look()

    def strike(self) -> None:
        """Now."""
        self._trigger = None
        self._blow()
        self.struck_s, self.struck_in = time.monotonic(), self.phase if self.held_in is None else self.held_in
        self._changed.set()

    async def until_struck(self, limit_s: float) -> bool:
        """Whether the blow fell, waiting for it at most that long."""
        with contextlib.suppress(DeadlineError):
            await self.until(lambda _: self.struck_s is not None, limit_s)
        self._trigger = None
        return self.struck_s is not None

    async def until(self, test: Callable[[Sample | None], bool], limit_s: float) -> Sample | None:
        """Wait until `test` holds of the newest sample (None: none yet). Raises: DeadlineError."""
        try:
            async with asyncio.timeout(limit_s):
                while not test(self.samples[-1] if self.samples else None):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as exc:
            raise DeadlineError("waiting for the fleet", limit_s) from exc
        return self.samples[-1] if self.samples else None

    def first(self, test: Callable[[Sample], bool], since_s: float) -> float | None:
        """Seconds from `since_s` to the first sample from which on `test` holds to the end; None: it doesn't."""
        at_s = None
        for sample in reversed([s for s in self.samples if s.at_s >= since_s]):
            if not test(sample):
                break
            at_s = sample.at_s
        return None if at_s is None else at_s - since_s

    def trace(self) -> str:
        """Every event, and the fleet whenever it looks another way; times in seconds from the blow."""
        zero_s = 0.0 if self.struck_s is None else self.struck_s
        lines = [(at_s, str(event)) for at_s, event in zip(self._came_s, self.events, strict=True)]
        before = ""
        for sample in self.samples:
            text = f"term {sample.view.term}, fleet {sample.view.version}: "
            text += "; ".join(_look_of(member) for member in sample.view.members)
            if text != before:
                lines.append((sample.at_s, text))
            before = text
        return "\n".join(f"{at_s - zero_s:+9.3f}  {text}" for at_s, text in sorted(lines))

    def _on_event(self, event: Event, _message: object) -> None:
        self.events.append(event)
        self._came_s.append(time.monotonic())
        if isinstance(event, OpStarted) and event.op == UPDATE:
            self._op_ids.add(event.op_id)
        if isinstance(event, OpAdvanced) and event.op_id in self._op_ids:
            self.phase, self.done = event.phase, event.done
        self._look()

    def _look(self) -> None:
        if self._trigger is not None and self._trigger(self):
            self.strike()
        self._changed.set()

    async def _sample(self) -> None:
        subject = subjects.control(self._namespace, "status")
        while True:
            with contextlib.suppress(RLBusError):
                question = GetFleet(op_id=self._bus.new_id())
                view = await self._bus.request(subject, question, FleetView, limit_s=ANSWER_S)
                self.samples.append(Sample(time.monotonic(), view))
                self._changed.set()
            await asyncio.sleep(SAMPLE_S)


def stood_still(samples: Sequence[Sample], num_terms: int, still_s: float) -> str:
    """What shows that a leader, or all of this machine, stood still for seconds, in words; "": nothing.

    `num_terms`: how often the case itself changes who leads; `still_s`: for how long it leaves us without a sample.
    """
    num_more = len({sample.view.term for sample in samples}) - 1 - num_terms
    gap_s = max((after.at_s - before.at_s for before, after in pairwise(samples)), default=0.0)
    signs = [f"{num_more} more terms than it takes"] if num_more > 0 else []
    signs += [f"no word of the controller for {gap_s:.1f} s"] if gap_s >= still_s else []
    return ", ".join(signs)


def paused(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Who lives and isn't running in the last sample."""
    members = samples[-1].view.members if samples else ()
    alive = [m for m in members if m.liveness is Liveness.ALIVE]
    return tuple(m.worker for m in alive if m.status.generation is not Generation.RUNNING)
