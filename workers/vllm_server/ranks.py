"""The processes that hold the model of one vLLM server, as the agent speaks to all of them at once: their group, and
what they can be asked.

vLLM has one call that reaches its transfer engine outside of an update, so joins, questions and their like all go by
it; each has a folder of its own for the answers (`exchange`).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rlbus.errors import EngineError
from rlbus.schemas import Fault, FaultCode, GroupPlan, JoinedData, RankSpan
from rlbus.workers.engines.found import Found
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.exchange import HELLO, TORN, CallFolder, Exchange, RankDraft, RankOutcome

# Engine calls that only change what the engine remembers: milliseconds, unless it is busy with a step.
CALL_S = 30.0
# What a join may take beyond the plan's time-out. Source: rlbus.transfer.group.JOIN_GRACE_S, and the way of its answer.
JOIN_GRACE_S = 3.0
# How long an engine that an agent before this one has left may still be in a transfer: the time-out of its group.
TAKE_OVER_S = 300.0
# Between two looks into a folder: short while a small model passes, longer then.
FIRST_POLL_S = 0.005
MAX_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Left:
    """How agents before this one have left an engine: with an update open, and which weights torn in the middle of one.

    `draft` is the draft model that every rank can update, None without one; its label is TORN if a rank's is, or if
    they don't agree on another. `is_draft_torn` says that of any draft: it is generated with, whoever could update it.
    """

    is_open: bool = False
    is_torn: bool = False
    draft: RankDraft | None = None
    is_draft_torn: bool = False

    def in_words(self) -> str:
        """What is torn."""
        parts = [name for name, is_torn in (("target", self.is_torn), ("draft", self.is_draft_torn)) if is_torn]
        return f"torn ({' and '.join(parts)})" if parts else "whole"

    def found(self, label: str | None, *, is_paused: bool, has_draft: bool) -> Found:
        """For the agent.

        Args:
            label: the engine's of its target, as in `Observed`. TORN tells of a reload, which no rank knows of.
            has_draft: the draft model is one that the agent may update.
        """
        draft_label = None if self.draft is None or not has_draft else self.draft.label
        return Found(label or None, is_paused, self.is_torn or label == TORN, draft_label, self.is_draft_torn)


def left_of(said: Sequence[RankOutcome]) -> Left:
    """What the answers of all ranks to HELLO amount to. Pure."""
    drafts = [outcome.draft for outcome in said if outcome.draft is not None]
    draft = drafts[0] if len(drafts) == len(said) and drafts else None
    if draft is not None and any(other != draft for other in drafts):
        draft = msgspec.structs.replace(draft, label=TORN)
    return Left(
        is_open=any(outcome.is_open for outcome in said),
        is_torn=any(outcome.weights_touched for outcome in said),
        draft=draft,
        is_draft_torn=any(one.label == TORN for one in (*drafts, draft) if one is not None),
    )


class Ranks:
    """All ranks of one engine. `world_size` counts them; `first_dp_index` is that of the worker's first engine."""

    def __init__(
        self, llm: Any, calls: EngineCalls, exchange: Exchange, *, world_size: int, first_dp_index: int
    ) -> None:
        self._llm = llm
        self._calls = calls
        self._exchange = exchange
        self._world_size = world_size
        self._first_dp_index = first_dp_index
        # There may be one to leave.
        self._may_have_group = False
        # Of the group that all are in, None outside of one.
        self.epoch: int | None = None

    def check(self, span: RankSpan) -> None:
        """Raise EngineError for a plan that counts them otherwise."""
        if span.num_ranks != self._world_size:
            text = f"the plan gives {span.num_ranks} ranks to a worker that has {self._world_size}"
            raise EngineError(Fault(code=FaultCode.GROUP_FAILED, message=text))

    async def join(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine.join_group`; an earlier group has been left, and the plan was checked."""
        folder = self._exchange.open("join")
        is_joined = False
        try:
            self._may_have_group = True
            await self._init(folder, plan=msgspec.to_builtins(plan), first_rank=span.first)
            outcomes = await self._joined(folder, plan.timeout_s + JOIN_GRACE_S)
            is_joined = True
        finally:
            if not is_joined:
                # A rank that still waits reads it, and gives up; the group is left by the agent's clean-up, too.
                folder.stop("the join was given up")
                asyncio.get_running_loop().call_later(MAX_POLL_S * 10, folder.remove)
            else:
                folder.remove()
        self.epoch = plan.epoch
        ranks = tuple(outcome.group_rank for outcome in outcomes)
        return JoinedData(epoch=plan.epoch, ranks=ranks, world_size=outcomes[0].group_size)

    async def _joined(self, folder: CallFolder, limit_s: float) -> list[RankOutcome]:
        """Every rank's outcome; the first failure is raised at once."""

        def failed() -> bool:
            return any(outcome is not None and outcome.fault is not None for outcome in self.outcomes(folder, "join"))

        try:
            async with asyncio.timeout(limit_s):
                outcomes = await self._all_outcomes(folder, "join", or_when=failed)
        except TimeoutError as exc:
            text = f"not every rank of the engine joined within {limit_s:g} s"
            raise EngineError(Fault(code=FaultCode.GROUP_FAILED, message=text)) from exc
        for rank, outcome in enumerate(outcomes):
            if outcome is not None and outcome.fault is not None:
                text = f"rank {rank} of the engine: {outcome.fault.message}"
                raise EngineError(Fault(code=FaultCode.GROUP_FAILED, message=text))
        return [outcome for outcome in outcomes if outcome is not None]

    async def leave(self) -> None:
        """Leave the group, if there may be one. Cancel: it may stand; called again, it is left."""
        self.epoch = None
        if not self._may_have_group:
            return
        await self._init(None)
        self._may_have_group = False

    async def hello(self) -> Left:
        """How an engine that ran before is, by every rank's answer. It may be in a group that nobody has left.

        Raises: EngineError: not every rank answers in our folder, so nothing could be joined either; EngineDeadError.
        Cancel: the ranks may go on answering.
        """
        folder = self._exchange.open(HELLO)
        try:
            await self._init(folder, ask=HELLO, limit_s=TAKE_OVER_S)
            outcomes = self.outcomes(folder, HELLO)
        finally:
            folder.remove()
        said = [outcome for outcome in outcomes if outcome is not None and outcome.fault is None]
        if len(said) < self._world_size:
            text = (
                f"{len(said)} of {self._world_size} ranks answer in {folder.path}: the worker has to be on the engine's"
                " machine, share its folders (RLBUS_RUN_DIR), and run the same version of rlbus"
            )
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text))
        self._may_have_group = True
        return left_of(said)

    async def ask(self, question: str) -> list[RankOutcome | None]:
        """What every rank answers. Within a call that holds the core (`EngineCalls.hold`).

        Cancel: the ranks may go on answering.
        """
        folder = self._exchange.open(question)
        try:
            return await self.ask_in(folder, question)
        finally:
            folder.remove()

    async def ask_in(self, folder: CallFolder, question: str, **more: Any) -> list[RankOutcome | None]:
        """The same, answered in a folder that is there; `more` goes with the question. Cancel: as `ask`."""
        await self._call_init(folder, ask=question, **more)
        return self.outcomes(folder, question)

    def outcomes(self, folder: CallFolder, step: str) -> list[RankOutcome | None]:
        """What is there of a step by now."""
        return [folder.outcome(step, rank) for rank in range(self._world_size)]

    async def rpc(self, method: str, **kwargs: Any) -> None:
        """As AsyncLLM's method of that name, without the request object from vLLM around its one argument.

        Cancel: the ranks do it all the same.
        """
        await self._llm.collective_rpc(method, kwargs=kwargs)

    async def _init(self, folder: CallFolder | None, *, limit_s: float = CALL_S, **more: Any) -> None:
        await self._calls.hold("init_weight_transfer_engine", lambda: self._call_init(folder, **more), limit_s)

    async def _call_init(
        self, folder: CallFolder | None, *, plan: Any = None, first_rank: int = 0, ask: str | None = None, **more: Any
    ) -> None:
        info = {
            "folder": "" if folder is None else folder.path,  # who only leaves has nothing to say
            "plan": plan,
            "first_rank": first_rank,
            "first_dp_index": self._first_dp_index,
            "ask": ask,
            **more,
        }
        await self.rpc("init_weight_transfer_engine", init_info=info)

    async def _all_outcomes(
        self, folder: CallFolder, step: str, *, or_when: Callable[[], bool]
    ) -> list[RankOutcome | None]:
        """Wait until every rank has left its outcome of `step`, or something is true. Raises EngineDeadError."""
        poll_s = FIRST_POLL_S
        while True:
            outcomes = self.outcomes(folder, step)
            if all(outcome is not None for outcome in outcomes) or or_when():
                return outcomes
            self._calls.check_alive()
            await asyncio.sleep(poll_s)
            poll_s = min(poll_s * 1.2, MAX_POLL_S)
