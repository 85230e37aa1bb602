"""A running `vllm-rs` server as an engine of rlbus, driven through its gRPC service `vllm.Control`.

The service has no call for a flush, for ending all requests, for sums or for reloads. The first two are made of its
pauses (`pausing`); the others go through rlbus's transfer backend, which lives in the ranks. What can't be done either
way isn't advertised.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from rlbus.errors import EngineDeadError, EngineError, FaultError, refused
from rlbus.schemas import (
    DRAFT_ROUTE,
    ChecksumsData,
    FaultCode,
    Generation,
    PausedData,
    PauseMode,
    SleepData,
    SleepTag,
)
from rlbus.workers.engines.base import NO_LABEL, EngineInfo, Observed
from rlbus.workers.engines.found import Found
from rlbus.workers.engines.sleep import SLEEP_ROUTES, in_order
from rlbus.workers.vllm_grpc.capabilities import Greeting, ServerFacts, backends_of, greeting_of, is_ours, routes_of
from rlbus.workers.vllm_grpc.control import CALL_S, Control
from rlbus.workers.vllm_grpc.pausing import Pausing
from rlbus.workers.vllm_grpc.sleeping import TAGS, Sleeping
from rlbus.workers.vllm_grpc.weights import GrpcWeights
from rlbus.workers.vllm_http.supervisor import LOST, tell_lost
from rlbus.workers.vllm_server.calls import CHECKSUM_S, EngineCalls
from rlbus.workers.vllm_server.checksums import checksums_data
from rlbus.workers.vllm_server.draft import WEIGHTLESS, expected_from
from rlbus.workers.vllm_server.engine import UNLABELLED
from rlbus.workers.vllm_server.exchange import CHECKSUMS, HELLO, Exchange, FolderError, RankDraft, clear_left
from rlbus.workers.vllm_server.model import expected_of
from rlbus.workers.vllm_server.ranks import Left
from rlbus.workers.vllm_server.updates import Updates
from rlbus.workers.vllm_server.updating import UpdatingEngine

_log = logging.getLogger("rlbus.workers")

# How long a server may take until it listens: it loads its model first.
CONNECT_S = 1500.0
# How long an engine may take to answer that is busy with weights, and mostly won't. Less than its watcher's patience.
GLANCE_S = 0.2
GLANCE_EVERY_S = 2.0
# How long closing may take. Source: the engine contract says 10 s for all of it.
LEAVE_S = 5.0


class VllmGrpcEngine(UpdatingEngine):
    """One `vllm-rs` server; see `Engine` for what each method promises. The server isn't ours: it outlives this.

    Args:
        control: the server's service, not connected yet; it is closed with the engine.
        completions_url: base URL of its OpenAI routes; None if nobody is to be told.
        run_dir: parent of the folder through which its ranks answer, used by nobody else; None is the system's
            temporary folder.
        connect_s: seconds to wait for a server that doesn't listen yet.
    """

    def __init__(
        self,
        control: Control,
        *,
        completions_url: str | None = None,
        run_dir: str | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        super().__init__()
        self._control = control
        self._completions_url = completions_url
        self._run_dir = run_dir
        self._connect_s = connect_s
        self._calls = EngineCalls(control)
        self._pausing = Pausing(control, self._calls)
        self._sleeping = Sleeping(control, self._calls, self._pausing)
        self._exchange: Exchange | None = None
        self._weights: GrpcWeights | None = None
        self._info: EngineInfo | None = None
        self._found: Found | None = None
        # What the ranks speculate with, whether an update of it can be served or not.
        self._speculates: RankDraft | None = None
        self._next_glance_s = 0.0

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""
        assert self._info is not None, "the engine has not been started"
        return self._info

    @property
    def found(self) -> Found:
        """See `FoundEngine`."""
        assert self._found is not None, "the engine has not been started"
        return self._found

    async def start(self) -> None:
        """Connect, and find out what the server can do. Cancel: leaves nothing that `aclose` doesn't."""
        await self._control.connect(self._connect_s)
        facts = await self._control.facts()
        self._calls = EngineCalls(self._control, facts.num_ranks)
        self._pausing = Pausing(self._control, self._calls)
        self._sleeping = Sleeping(self._control, self._calls, self._pausing)
        if self._run_dir is not None:
            clear_left(self._run_dir)
        self._exchange = Exchange(self._run_dir)
        self._weights = GrpcWeights(self._control, self._exchange, facts.num_ranks)
        greeting = await self._greet(facts)
        self._speculates = greeting.draft
        if greeting.problem is None:
            self._expected = await asyncio.to_thread(expected_of, facts.model)
            if greeting.draft is not None and facts.has_draft:
                self._draft = await asyncio.to_thread(expected_from, greeting.draft)
        else:
            _log.warning("updates of %s are off: %s", facts.served_name, greeting.problem)
        self._updates = Updates(
            self._weights,
            self._calls,
            self._exchange,
            world_size=facts.num_ranks,
            first_dp_index=0,
            expected=self._expected,
            has_transfer=greeting.problem is None,
        )
        backends = backends_of(facts, greeting) if self._expected is not None else ()
        self._info = EngineInfo(
            engine="vllm_grpc",
            model=facts.served_name,
            world_size=facts.num_ranks,
            routes=routes_of(
                facts, greeting, has_expected=self._expected is not None, has_draft=self._draft is not None
            ),
            backends=backends,
            completions_url=self._completions_url,
        )
        left = await self._updates.take_over() if greeting.problem is None else Left()
        observed = await self.observe()
        is_paused = observed.generation is Generation.PAUSED
        self._sleeping.is_known = not is_paused or not self.sleep_tags
        self._found = left.found(observed.weight_version, is_paused=is_paused, has_draft=self._has_draft)

    @property
    def _has_draft(self) -> bool:
        return DRAFT_ROUTE in self.info.routes

    async def _greet(self, facts: ServerFacts) -> Greeting:
        """Whether the ranks have rlbus's transfer backend, and see the folder that they are to answer in."""
        if (problem := is_ours(facts)) is not None:
            return Greeting(problem=problem)
        assert self._weights is not None
        try:
            weights = self._weights
            return greeting_of(await self._calls.hold("hello", lambda: weights.ask(HELLO, CALL_S), CALL_S))
        except FolderError:
            raise  # says nothing of its backend
        except EngineError as exc:
            self._calls.check_alive()
            text = "its transfer backend isn't rlbus's; start the server with rlbus installed and VLLM_PLUGINS=rlbus"
            return Greeting(problem=f"{text} ({exc.fault.message})")

    def _tell_if_lost(self) -> None:
        """A server that runs on with a lost engine has to be started anew. Whoever supervises it, if that is us, is
        told by a file. Not one that is gone, or was started anew already.
        """
        is_server_gone = self._control.errored and not self._control.has_dead_engine
        if self._calls.death is not None and not is_server_gone and self._run_dir is not None:
            tell_lost(Path(self._run_dir, LOST))

    async def aclose(self) -> None:
        """Drop the group and the connection; the server goes on. Idempotent.

        Cancel: the group may stand as long as the server does.
        """
        updates, self._updates = self._updates, None
        try:
            if updates is not None and self._calls.death is None:
                async with asyncio.timeout(LEAVE_S):
                    await updates.leave()
        except (TimeoutError, EngineError) as exc:
            _log.warning("the group could not be left: %s", exc)
        finally:
            self._tell_if_lost()
            self._calls.close()
            if self._exchange is not None:
                self._exchange.close()
            await self._control.aclose()

    async def observe(self) -> Observed:
        """Ask the engine, and its server whether it is still the same. While the engine is inside a call that changes
        the weights it can't answer, but can't generate either.

        Raises: EngineError, EngineDeadError. Cancel: leaves nothing.
        """
        self._calls.check_alive()
        await self._calls.ask("GetServerInfo", self._control.check_instance, CALL_S)
        if self._calls.is_held_paused:
            await self._glance()
            return Observed(Generation.PAUSED, asleep=self._sleeping.asleep)
        is_paused = await self._calls.ask("IsPaused", self._control.is_paused, CALL_S)
        label = await self._calls.ask("GetWeightVersion", self._control.get_version, CALL_S)
        generation = Generation.PAUSED if is_paused else Generation.RUNNING
        return Observed(generation, NO_LABEL if label == UNLABELLED else label, asleep=self._sleeping.asleep)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """See `Engine`. The service counts no requests. Cancel: the engine is, or becomes, paused."""
        await self._pausing.pause(mode, clear_cache)
        return PausedData()

    async def resume(self) -> None:
        """See `Engine`. Raises: AsleepError: the server itself would step over memory that isn't there."""
        await self._calls.settle(CALL_S)
        if not self._sleeping.is_known:
            await self._sleeping.wake_up(TAGS)
        if asleep := self._sleeping.asleep:
            tags = ", ".join(in_order(asleep))
            raise refused(FaultCode.ASLEEP, f"asleep: {tags}; wake it before it generates", tags=tags)
        await self._pausing.resume()

    async def flush_cache(self) -> None:
        """See `Engine`. Requests that hold blocks are preempted, and compute them anew from the weights of then."""
        try:
            await self._pausing.flush()
        except EngineError as exc:
            self._calls.check_alive()
            raise refused(FaultCode.FLUSH_FAILED, exc.fault.message) from exc

    async def abort(self, request_ids: Sequence[str] | None) -> int | None:
        """See `Engine`. Ids are those that the server knows, or the X-Request-Id of an HTTP request."""
        if request_ids is None:
            await self._pausing.abort_all()
        elif request_ids:
            await self._calls.ask("Abort", lambda: self._control.abort(_spellings(request_ids)), CALL_S)
        return None

    # --- SleepEngine

    @property
    def sleep_tags(self) -> frozenset[SleepTag]:
        """None where the server has no sleep."""
        return TAGS if self.info.routes >= SLEEP_ROUTES else frozenset()

    def go_on_asleep(self, tags: frozenset[SleepTag]) -> None:
        """See `FoundAsleep`."""
        self._sleeping.go_on(tags)

    async def sleep(self, tags: frozenset[SleepTag], level: int, mode: PauseMode) -> SleepData:
        """See `SleepEngine`. Both tags at once only, and not discarding a draft model: the server generates at once
        with the last wake, and its label speaks of the target only.
        """
        if level > 1 and self._speculates is not None and self._speculates.method not in WEIGHTLESS:
            text = "level 2 would discard the draft model's weights, and the server generate with what is left; use 1"
            raise refused(FaultCode.BAD_MESSAGE, text, level=level)
        return await self._sleeping.sleep(tags, level, mode)

    async def wake_up(self, tags: frozenset[SleepTag]) -> SleepData:
        """See `SleepEngine`. The last wake is refused as long as discarded or torn weights haven't been replaced."""
        is_unfit = self._updates is not None and self._updates.is_unfit
        return await self._sleeping.wake_up(tags, is_unfit=is_unfit)

    # --- weights

    async def checksums(self) -> ChecksumsData:
        """vLLM's own, as the ranks compute them: see `VllmEngine.checksums`. Cancel: they go on computing."""
        weights = self._weights
        assert weights is not None, "not started"
        limit_s = CHECKSUM_S
        outcomes = await self._calls.hold("checksums", lambda: weights.ask(CHECKSUMS, limit_s), limit_s)
        answers = greeting_of(outcomes)
        if answers.problem is not None:
            raise refused(FaultCode.ENGINE_FAILED, answers.problem)
        return checksums_data(pair for outcome in outcomes if outcome is not None for pair in outcome.digests.items())

    async def _glance(self) -> None:
        """Ask an engine that is busy with weights. No answer says nothing, but the server of a dead one says so.

        Seldom, since the server logs a warning for each answer that nobody waits for any more.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_glance_s:
            return
        self._next_glance_s = now_s + GLANCE_EVERY_S
        try:
            await self._control.is_paused(GLANCE_S)
        except EngineDeadError:
            raise
        except FaultError as exc:
            _log.debug("the engine is busy: %s", exc)


def _spellings(request_ids: Sequence[str]) -> list[str]:
    """The ids as given, and as the OpenAI routes make them of an X-Request-Id (seen with vllm-rs 0.32)."""
    return [f"{prefix}{request_id}" for request_id in request_ids for prefix in ("", "cmpl-", "chatcmpl-")]
