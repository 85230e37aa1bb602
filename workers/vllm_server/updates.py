"""The group and the weights of one vLLM server, as the agent changes them: join, receive, finish, abort, reload.

vLLM has no call that tells how a transfer goes, nor one that ends it, so each has a folder beside it (`exchange`).
The weights count as touched as soon as one rank says so, or doesn't say anything.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec

from rlbus.errors import EngineDeadError, FaultError, refused
from rlbus.schemas import ChecksumsData, Fault, FaultCode, GroupPlan, JoinedData, RankSpan, ReceivedData, Version
from rlbus.workers.checkpoint import CheckpointError, read_folder
from rlbus.workers.disk import DISK
from rlbus.workers.engines.base import ProgressFn, ReadyFn, ReceiveOrder, UpdateFailedError
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.checkpoint import ExpectedTensors
from rlbus.workers.vllm_server.draft import DraftSums
from rlbus.workers.vllm_server.exchange import (
    CHECKSUMS,
    LABEL_DRAFT,
    TORN,
    CallFolder,
    Exchange,
    FolderError,
    RankOutcome,
)
from rlbus.workers.vllm_server.ranks import CALL_S, FIRST_POLL_S, MAX_POLL_S, Left, Ranks

_log = logging.getLogger("rlbus.workers")

# Putting layers together, and reading a checkpoint from a slow disk.
LOAD_S = 1800.0
# The longest transfer; the agent's deadline is normally far below it.
TRANSFER_S = 3600.0
# How long a transfer that was told to stop may take to come back, before its caller goes.
RELEASE_S = 1.5


class _Session:
    """An update that was begun and neither finished nor aborted."""

    def __init__(self, folder: CallFolder | None, is_draft: bool = False) -> None:
        self.folder = folder
        # vLLM is told at the start which model it is about.
        self.is_draft = is_draft
        # vLLM's own session is open: its start came back, and its finish didn't.
        self.is_open = False
        # vLLM was asked to change weights, so from here on silence means doubt.
        self.was_asked = False
        self.is_received = False
        self.is_touched = False


class Updates:
    """Changes the weights of one engine. `world_size` counts the processes that hold the model.

    Args:
        llm: vLLM's AsyncLLM.
        expected: what a full update consists of.
        has_transfer: the engine was configured with the backend of `transfer.py`.
    """

    def __init__(
        self,
        llm: Any,
        calls: EngineCalls,
        exchange: Exchange,
        *,
        world_size: int,
        first_dp_index: int,
        expected: ExpectedTensors | None,
        has_transfer: bool,
    ) -> None:
        self._llm = llm
        self._calls = calls
        self._exchange = exchange
        self._ranks = Ranks(llm, calls, exchange, world_size=world_size, first_dp_index=first_dp_index)
        self._world_size = world_size
        self._expected = expected
        self._has_transfer = has_transfer
        self._session: _Session | None = None
        # From the first tensor of an update of the draft to the end of a whole one; the ranks say it of one before us.
        self._is_draft_torn = False

    @property
    def is_unfit(self) -> bool:
        """Whether the engine would generate on weights that aren't whole, though vLLM's label, which is the target's,
        may not say so: a torn draft, or an update in its middle.
        """
        return self._is_draft_torn or (self._session is not None and self._is_touched(self._session))

    # --- the group

    async def join(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine.join_group`."""
        self._ranks.check(span)
        await self.leave()
        return await self._ranks.join(plan, span)

    async def leave(self) -> None:
        """See `Engine.leave_group`. May be called beside a transfer, which it ends."""
        session = self._session
        if session is not None and session.folder is not None:
            self._stop(session.folder, "the group was left")
        await self._ranks.leave()

    async def take_over(self) -> Left:
        """Bring an engine that ran before this agent to where an update can begin: no group, no open session. What its
        weights may be. Called once, before anything else, by agents that live outside of the engine.

        Raises: EngineError: not every rank answers in our folder, so nothing could be joined either; EngineDeadError.
        Cancel: called again, it finishes.
        """
        left = await self._ranks.hello()
        self._is_draft_torn = left.is_draft_torn
        await self.leave()
        if left.is_open:
            _log.warning("an update that nobody finished is closed; the weights are %s", left.in_words())
            if left.is_torn:
                await self._label(TORN)
            session = _Session(None)
            session.is_open = True
            await self._close(session)
        return left

    # --- an update over the group

    async def receive(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `Engine.receive_weights`."""
        if self._ranks.epoch is None or self._ranks.epoch != order.epoch:
            text = f"the engine is in no group {order.epoch}"
            raise UpdateFailedError(Fault(code=FaultCode.STALE_EPOCH, message=text), self._has_part)
        session = await self._next_part(order.is_draft)
        try:
            await self._open(session)
            await self._transfer(session, order, on_ready, on_progress)
        except FaultError as exc:
            session.is_touched = isinstance(exc, EngineDeadError) or self._is_touched(session)
            raise UpdateFailedError(exc.fault, session.is_touched) from exc
        return self._received(session, order)

    @property
    def _has_part(self) -> bool:
        """Whether an earlier part of the update that is open came."""
        return self._session is not None and self._session.is_touched

    async def _next_part(self, is_draft: bool) -> _Session:
        """The first of an update, or the next: each is a session of vLLM's own, and what has come stays touched."""
        earlier = self._session
        is_touched = earlier is not None and self._is_touched(earlier)
        if earlier is not None:
            if earlier.is_open and is_touched and earlier.folder is not None:
                await self._put_together(earlier, TORN)  # the ranks forget with it what has come
            elif earlier.is_open:  # nothing came in it: it was opened to clean up, or never begun
                await self._give_up(earlier, is_touched)
        try:
            folder = self._exchange.open("update")
        except FolderError as exc:
            raise UpdateFailedError(exc.fault, is_touched) from exc
        if earlier is not None:
            self._end(earlier)
        session = self._session = _Session(folder, is_draft)
        session.is_touched = is_touched
        return session

    async def _give_up(self, session: _Session, is_touched: bool) -> None:
        try:
            await self._close(session)
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, is_touched) from exc

    async def _open(self, session: _Session) -> None:
        async def start() -> None:
            await (self._llm.start_draft_weight_update() if session.is_draft else self._llm.start_weight_update())
            session.is_open = True

        await self._calls.hold("start_weight_update", start, CALL_S, is_paused=True)

    async def _transfer(
        self, session: _Session, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn
    ) -> None:
        assert session.folder is not None
        info = {
            "folder": session.folder.path,
            "epoch": order.epoch,
            "stream_id": order.update_op_id,
            "bucket_bytes": order.bucket_bytes,
            "tensors": msgspec.to_builtins(order.tensors),
        }

        async def update() -> None:
            session.was_asked = True
            try:
                await self._ranks.rpc("update_weights", update_info=info)
            except FolderError:
                session.was_asked = False
                raise
            except Exception:
                session.is_open = False  # vLLM closes its session when the call itself fails
                raise

        receiving = asyncio.ensure_future(self._calls.hold("update_weights", update, TRANSFER_S, is_paused=True))
        try:
            await self._report(session.folder, receiving, on_ready, on_progress)
            await receiving
        except asyncio.CancelledError:
            self._stop(session.folder, "the update was cancelled")
            await asyncio.wait({receiving}, timeout=RELEASE_S)
            raise
        finally:
            receiving.cancel()

    async def _report(
        self, folder: CallFolder, receiving: "asyncio.Future[None]", on_ready: ReadyFn, on_progress: ProgressFn
    ) -> None:
        """Tell how far the slowest rank is, until the transfer has ended."""
        is_ready = False
        last = 0
        poll_s = FIRST_POLL_S
        while True:
            has_ended = receiving.done()
            counts = [folder.progress(rank) for rank in range(self._world_size)]
            known = [count for count in counts if count is not None]
            if len(known) == self._world_size:
                if not is_ready:
                    is_ready = True
                    on_ready()
                done, total = min(known)
                if done > last:
                    last = done
                    on_progress(done, total)
            if has_ended:
                return
            await asyncio.wait({receiving}, timeout=poll_s)
            poll_s = min(poll_s * 1.2, MAX_POLL_S)

    def _is_touched(self, session: _Session) -> bool:
        """After vLLM was asked, every rank has to say that its weights are as they were; if not in an earlier part."""
        if session.is_touched or session.folder is None or not session.was_asked:
            return session.is_touched or session.was_asked
        outcomes = self._ranks.outcomes(session.folder, "receive")
        return any(outcome is None or outcome.weights_touched for outcome in outcomes)

    def _received(self, session: _Session, order: ReceiveOrder) -> ReceivedData:
        """Compare what the ranks say."""
        assert session.folder is not None
        outcomes = self._ranks.outcomes(session.folder, "receive")
        session.is_touched = self._is_touched(session)
        first = outcomes[0]
        for rank, outcome in enumerate(outcomes):
            fault = _unlike(rank, first, outcome)
            if fault is not None:
                raise UpdateFailedError(fault, session.is_touched)
        assert first is not None
        said = [outcome for outcome in outcomes if outcome is not None]
        session.is_received = True
        return ReceivedData(
            num_bytes=first.num_bytes,
            num_tensors=first.num_tensors,
            sums=first.sums,
            receive_s=max(outcome.receive_s for outcome in said),
            load_s=max(outcome.load_s for outcome in said),
        )

    async def finish(self, version: Version) -> None:
        """See `Engine.finish_update`."""
        session = self._session
        if session is None or not session.is_received or session.folder is None:
            text = f"no transfer to version {version} was received"
            raise UpdateFailedError(Fault(code=FaultCode.WRONG_STATE, message=text), self._has_part)
        await self._put_together(session, str(version))
        self._is_draft_torn = self._is_draft_torn and not session.is_draft
        self._end(session)

    async def _put_together(self, session: _Session, label: str) -> None:
        """Close vLLM's session over what was received, and label it. Raises UpdateFailedError."""
        assert session.folder is not None
        session.is_received = False
        try:
            await self._close(session)
            outcomes = self._ranks.outcomes(session.folder, "finish")
            fault = next((fault for rank, o in enumerate(outcomes) if (fault := _problem(rank, o))), None)
            if fault is None:
                fault = await self._label_of(session, label)
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, weights_touched=True) from exc
        if fault is not None:
            raise UpdateFailedError(fault, weights_touched=True)

    async def abort(self) -> None:
        """See `Engine.abort_update`."""
        session = self._session
        if session is None:
            return
        if session.folder is not None:
            self._stop(session.folder, "the update was aborted")
        await self._calls.settle(CALL_S)
        session.is_touched = self._is_touched(session)
        if session.is_touched:
            self._is_draft_torn = self._is_draft_torn or session.is_draft
            await self._label_of(session, TORN)
        if self._has_transfer:
            if not session.is_open:
                await self._open(session)
            await self._close(session)
        self._end(session)

    def _stop(self, folder: CallFolder, why: str) -> None:
        """Let the ranks give a transfer up; an engine that doesn't come back from it is lost."""
        try:
            folder.stop(why)
        finally:
            self._calls.call_back()

    async def _close(self, session: _Session) -> None:
        async def finish() -> None:
            await self._llm.finish_weight_update()
            session.is_open = False

        await self._calls.hold("finish_weight_update", finish, LOAD_S, is_paused=True)

    async def _label_of(self, session: _Session, label: str) -> Fault | None:
        """Label what the session is about. vLLM has no label of the draft's, so the ranks keep that one: what is wrong
        with one that doesn't say that it does.
        """
        folder = session.folder
        if not session.is_draft or folder is None:
            await self._label(label)
            return None
        outcomes = await self._calls.hold(
            "label of the draft model",
            lambda: self._ranks.ask_in(folder, LABEL_DRAFT, label=label),
            CALL_S,
            is_paused=True,
        )
        return next((fault for rank, o in enumerate(outcomes) if (fault := _problem(rank, o))), None)

    async def label(self, version: Version) -> None:
        """See `LabelEngine.label_weights`."""
        await self._label(str(version))

    async def _label(self, label: str) -> None:
        await self._calls.ask("update_weight_version", lambda: self._llm.update_weight_version(label), CALL_S)

    async def draft_checksums(self) -> ChecksumsData:
        """See `DraftEngine.draft_checksums`."""
        session = self._session
        return await DraftSums(self._llm, self._calls, self._ask_sums).read(
            None if session is None else session.is_draft
        )

    async def _ask_sums(self) -> list[RankOutcome | None]:
        """Every rank's checksums of the model that vLLM's session is about. Within a call that holds the core."""
        return await self._ranks.ask(CHECKSUMS)

    @property
    def is_about_draft(self) -> bool:
        """Whether the update that is open is the draft's."""
        return self._session is not None and self._session.is_draft

    def _end(self, session: _Session) -> None:
        if session.folder is not None:
            session.folder.remove()
        self._session = None

    # --- from disk

    async def check_folder(self, path: str) -> None:
        """See `Engine.check_checkpoint`."""
        assert self._expected is not None
        try:
            specs = await DISK.run(lambda: read_folder(Path(path)), path)
        except CheckpointError as exc:
            raise refused(FaultCode.MANIFEST_MISMATCH, str(exc), path=exc.path) from exc
        self._expected.check(specs)

    async def load(self, path: str, version: Version) -> None:
        """See `Engine.load_weights`. The folder is compared with the model before vLLM is asked to read it."""
        try:
            await self.check_folder(path)
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, weights_touched=False) from exc
        await self.abort()
        session = self._session = _Session(None)

        async def reload() -> None:
            session.was_asked = True
            try:
                await self._ranks.rpc("reload_weights", weights_path=path)
            except FolderError:
                session.was_asked = False
                raise

        try:
            await self._calls.hold("reload_weights", reload, LOAD_S, is_paused=True)
            await self._label(str(version))
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, weights_touched=not isinstance(exc, FolderError)) from exc
        self._end(session)


def _problem(rank: int, outcome: RankOutcome | None) -> Fault | None:
    if outcome is None:
        return Fault(code=FaultCode.ENGINE_FAILED, message=f"rank {rank} of the engine doesn't say how it ended")
    return outcome.fault


def _unlike(rank: int, first: RankOutcome | None, outcome: RankOutcome | None) -> Fault | None:
    """What is wrong with a rank's part of a transfer, alone or compared with the first rank's."""
    problem = _problem(rank, outcome)
    if problem is not None or first is None or outcome is None or outcome.sums == first.sums:
        return problem
    pairs = zip(first.sums, outcome.sums, strict=False)
    bad = next((ours.name for ours, theirs in pairs if ours != theirs), "")
    text = f"rank {rank} of the engine received other bytes of {bad!r} than rank 0"
    return Fault(code=FaultCode.CHECKSUM_MISMATCH, message=text, detail={"tensor": bad})
