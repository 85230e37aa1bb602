"""Bugs that are planted to see the simulation fail: at least one per invariant, patched in from here.

Nothing of this is in shipped code: a bug stands only while `planted` is open, in the process that runs the seed.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec

from rlbus import trainer
from rlbus.controller import admission, attempts, service, transaction, verbs, winding
from rlbus.controller.catching_up import CatchUps
from rlbus.controller.fence import FencedTransport
from rlbus.controller.registry import Member, Registry
from rlbus.schemas import Generation, Liveness
from rlbus.workers import checks, lifecycle, mutations
from rlbus.workers.agent import Agent
from rlbus.workers.journal import Journal, Record


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug. `seed` is one that was seen to catch it: it is looked at first, since any change of the code draws other
    faults, and then the others in order.
    """

    invariant: str
    what: str
    seed: int
    plant: Callable[[contextlib.ExitStack], None]


def _admit_whatever_weights(stack: contextlib.ExitStack) -> None:
    def unadmitted(registry: Registry, member: Member) -> str | None:
        if member.liveness is not Liveness.ALIVE or member.status.generation is not Generation.RUNNING:
            return "not there"
        return None

    stack.enter_context(patch.object(Registry, "unadmitted", unadmitted))


def _verify_nothing(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(transaction, "check_received", lambda sums, received: None))


def _resume_on_old_caches(stack: contextlib.ExitStack) -> None:
    async def resume(engine: Any, around: Any) -> None:
        await engine.resume()

    stack.enter_context(patch.object(mutations, "_resume", resume))


def _bury_the_living(stack: contextlib.ExitStack) -> None:
    hear = Registry.hear

    def deaf(registry: Registry, message: Any, now_s: float) -> Any:
        known = None
        if hasattr(message, "descriptor"):
            known = registry._members.get(f"{message.descriptor.component}/{message.descriptor.instance_id}")  # type: ignore[call-overload]
        return () if known is not None and known.liveness is Liveness.DEAD else hear(registry, message, now_s)

    stack.enter_context(patch.object(Registry, "hear", deaf))


def _forget_what_ended(stack: contextlib.ExitStack) -> None:
    def find(journal: Journal, op_id: str) -> Record | None:
        return journal._running.get(op_id)

    stack.enter_context(patch.object(Journal, "find", find))


def _obey_old_terms(stack: contextlib.ExitStack) -> None:
    refusal = lifecycle._refusal

    def blind(state: Any, event: Any) -> Any:
        command = msgspec.structs.replace(event.command, term=max(event.command.term, state.term))
        return refusal(state, replace(event, command=command))

    stack.enter_context(patch.object(lifecycle, "_refusal", blind))


def _act_without_the_lease(stack: contextlib.ExitStack) -> None:
    init = FencedTransport.__init__

    def unfenced(fence: FencedTransport, inner: Any, may_publish: Any) -> None:
        init(fence, inner, lambda: True)

    stack.enter_context(patch.object(FencedTransport, "__init__", unfenced))


def _retry_in_the_same_group(stack: contextlib.ExitStack) -> None:
    again = attempts.next_attempt

    def stale(state: Any) -> Any:
        after = again(state)
        return replace(after, plan=replace(after.plan, next_epoch=after.plan.next_epoch - 1))

    stack.enter_context(patch.object(attempts, "next_attempt", stale))
    for module in (transaction, winding):
        if hasattr(module, "next_attempt"):
            stack.enter_context(patch.object(module, "next_attempt", stale))


def _admit_who_is_caught_up(stack: contextlib.ExitStack) -> None:
    unadmitted, begin = Registry.unadmitted, CatchUps._begin
    begun: set[str] = set()

    def noted(catch_ups: CatchUps, snapshot: Any, workers: Any, now_s: float) -> None:
        begun.update(workers)
        begin(catch_ups, snapshot, workers, now_s)

    def trusting(registry: Registry, member: Member) -> str | None:
        is_running = member.status.generation is Generation.RUNNING and member.liveness is Liveness.ALIVE
        return None if member.worker in begun and is_running else unadmitted(registry, member)

    stack.enter_context(patch.object(CatchUps, "_begin", noted))
    stack.enter_context(patch.object(Registry, "unadmitted", trusting))


def _never_catch_up(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(CatchUps, "tick", lambda *_: None))


def _never_end_leases(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(Agent, "_on_lease_end", lambda *_: None))


def _obey_what_expired(stack: contextlib.ExitStack) -> None:
    refusal = lifecycle._refusal

    def blind(state: Any, event: Any) -> Any:
        return refusal(state, replace(event, now=0.0))

    stack.enter_context(patch.object(lifecycle, "_refusal", blind))


def _take_any_version(stack: contextlib.ExitStack) -> None:
    stack.enter_context(patch.object(checks, "_check_version", lambda *_: None))
    stack.enter_context(patch.object(admission, "check_version", lambda *_, **__: None))
    stack.enter_context(patch.object(trainer, "_check_grows", lambda *_: None))


def _leave_one_out(stack: contextlib.ExitStack) -> None:
    for module, name in ((service, "update_report"), (verbs, "verb_report")):
        build = getattr(module, name)

        def short(*args: Any, build: Any = build, **fields: Any) -> Any:
            report = build(*args, **fields)
            kept = report.outcomes[:-1] if len(report.outcomes) > 1 else report.outcomes
            return msgspec.structs.replace(report, outcomes=kept)

        stack.enter_context(patch.object(module, name, short))


BUGS = {
    "admit-whatever-weights": Bug("I1", "workers are admitted whatever their weights are", 0, _admit_whatever_weights),
    "verify-nothing": Bug("I2", "checksums of a transfer aren't compared", 135, _verify_nothing),
    "resume-on-old-caches": Bug("I2", "a resume doesn't flush what is owed", 10, _resume_on_old_caches),
    "bury-the-living": Bug("I3", "a worker that was silent once is dead for ever", 12, _bury_the_living),
    "forget-what-ended": Bug("I4", "a worker's journal forgets ended ops", 9, _forget_what_ended),
    "leave-one-out": Bug("I4", "a report lacks one of its workers", 0, _leave_one_out),
    "obey-old-terms": Bug("I5", "a worker obeys a controller that was replaced", 470, _obey_old_terms),
    "act-without-the-lease": Bug("I5", "a leader speaks on when its lease is over", 7, _act_without_the_lease),
    "obey-what-expired": Bug("I5", "a worker obeys a command that came too late", 9, _obey_what_expired),
    "admit-who-is-caught-up": Bug("I1", "who is being caught up is admitted at once", 0, _admit_who_is_caught_up),
    "never-catch-up": Bug("I3", "nobody is brought to the fleet's version", 0, _never_catch_up),
    "never-end-leases": Bug("I3", "a pause whose owner died doesn't end", 214, _never_end_leases),
    "retry-in-the-same-group": Bug("I5", "a retry takes the epoch that broke", 5, _retry_in_the_same_group),
    "take-any-version": Bug("I6", "nobody checks that versions grow", 28, _take_any_version),
}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """While inside, this bug is in rlbus; None: as it is."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            BUGS[name].plant(stack)
        yield
