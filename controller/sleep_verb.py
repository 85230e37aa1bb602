"""Sleep and wake of the fleet: a sleep that half succeeds is taken back on exactly the workers that it put to sleep.

What slept before on a worker still sleeps afterwards. With level 2 the weights are gone and waking brings none back, so
what has fallen asleep stays asleep, and the report says which.
"""

from collections.abc import Iterable, Mapping, Sequence

from rlbus.controller.line import Line
from rlbus.controller.op import Op
from rlbus.controller.registry import Member
from rlbus.controller.verbs import Answers, FleetVerb
from rlbus.schemas import Outcome, Report, Sleep, SleepFleet, SleepTag, WakeFleet, WakeUp, WorkerId

Tags = tuple[SleepTag, ...]
# Level from which a sleep costs the weights.
DISCARDING_LEVEL = 2


def to_wake(answers: Answers, before: Mapping[WorkerId, Tags], tags: Tags | None) -> dict[Tags | None, list[WorkerId]]:
    """Who has to be woken, by the tags that it had awake before: who did as told, and who may have. A worker that said
    no, or failed, is as it was by its own doing.
    """
    return by_tags([w for w, a in answers.items() if a.outcome in (Outcome.OK, Outcome.UNKNOWN)], before, tags)


def by_tags(
    workers: Iterable[WorkerId], before: Mapping[WorkerId, Tags], tags: Tags | None
) -> dict[Tags | None, list[WorkerId]]:
    """`workers`, by the tags that a sleep of `tags` may have put to sleep on them; who slept as far before is out."""
    groups: dict[Tags | None, list[WorkerId]] = {}
    for worker in workers:
        slept = before.get(worker, ())
        # Without anything that slept before, "all" is the word: the worker knows best what it has.
        mine = tags if not slept else tuple(t for t in (tuple(SleepTag) if tags is None else tags) if t not in slept)
        if mine is None or mine:
            groups.setdefault(mine, []).append(worker)
    return groups


class SleepVerb(FleetVerb):
    """A sleep or a wake of `members`."""

    def __init__(self, op: Op, line: Line, members: Sequence[Member]) -> None:
        super().__init__(op, line, [m.worker for m in members])
        self._asleep_before: dict[WorkerId, Tags] = {m.worker: m.status.asleep for m in members}

    async def sleep(self, request: SleepFleet) -> Report:
        """Put everybody to sleep, or nobody. Cancel: as `plain`; `Op.stop` is the way to take it back."""
        body = Sleep(tags=request.tags, level=request.level, mode=request.mode)
        answers = await self._ask("sleep", "sleep", body, self._workers)
        self._book.note("sleep", answers)
        stop = self._op.stop_fault
        if stop is None and all(answer.is_ok for answer in answers.values()):
            return self._report()
        if stop is not None:
            self._book.causes.append(stop)
        if request.level < DISCARDING_LEVEL:
            await self._undo(to_wake(answers, self._asleep_before, request.tags), answers)
        return self._report()

    async def wake(self, request: WakeFleet) -> Report:
        """Wake everybody, as far as each can. Cancel: as `plain`."""
        answers = await self._ask("wake", "wake", WakeUp(tags=request.tags), self._workers)
        self._book.note("wake", answers)
        return self._report()

    async def _undo(self, groups: Mapping[Tags | None, Sequence[WorkerId]], answers: Answers) -> None:
        for number, (tags, workers) in enumerate(groups.items()):
            self._book.undone([w for w in workers if answers[w].is_ok], "sleep")
            self._note_undo(await self._asker.until_free("undo", f"undo-{number}", WakeUp(tags=tags), workers))
