"""Sleep and wake of a `vllm-rs` server.

What the service leaves open, and what is made of it here:
- It puts weights and KV cache to sleep together only, and wakes them apart. So a part alone is refused.
- Its IsSleeping is true of an engine that is merely paused (vLLM 0.32, v1/engine/core.py). So what sleeps is kept here;
  what sleeps of an engine that ran before is what the agent before noted.
- With its last tag awake the engine generates at once, whoever has paused it. So it is paused again as soon as the wake
  returns: a request may run for the milliseconds in between, but never on weights that were discarded. Those carry the
  label of torn ones, from before they go until an update has replaced them, and the last wake is refused as long. So it
  is in the middle of an update, or with a torn draft model: that label tells of neither (`Updates.is_unfit`).
"""

import contextlib

from rlbus.errors import FaultError, refused
from rlbus.schemas import FaultCode, PauseMode, SleepData, SleepTag
from rlbus.workers.checks import REFUSALS
from rlbus.workers.engines.base import UpdateFailedError
from rlbus.workers.engines.sleep import in_order
from rlbus.workers.vllm_grpc.control import CALL_S, Control
from rlbus.workers.vllm_grpc.pausing import WAIT_S, Pausing
from rlbus.workers.vllm_server.calls import EngineCalls
from rlbus.workers.vllm_server.exchange import TORN

TAGS = frozenset({SleepTag.WEIGHTS, SleepTag.KV_CACHE})
# 1 keeps the weights in host memory, 2 discards them.
LEVELS = (1, 2)
# Moving the weights of a large model to host memory and back.
MOVE_S = 600.0


class Sleeping:
    """What sleeps of one server. In doubt (a sleep that failed, or was cut off) it counts as asleep."""

    def __init__(self, control: Control, calls: EngineCalls, pausing: Pausing) -> None:
        self._control = control
        self._calls = calls
        self._pausing = pausing
        self.asleep: frozenset[SleepTag] = frozenset()
        # Whether anybody knows what sleeps. Not of a server that was found paused, and of which nothing was noted.
        self.is_known = True

    def go_on(self, tags: frozenset[SleepTag]) -> None:
        """These sleep, as the agent before noted, and no others."""
        self.asleep, self.is_known = tags, True

    async def sleep(self, tags: frozenset[SleepTag], level: int, mode: PauseMode) -> SleepData:
        """See `SleepEngine.sleep`. Cancel: it may sleep, and counts so; weights that may be gone are labelled torn."""
        if level not in LEVELS:
            raise refused(FaultCode.BAD_MESSAGE, f"vLLM has no sleep level {level}; use 1 or 2", level=level)
        if tags != TAGS:
            text = f"vLLM puts {', '.join(in_order(TAGS))} to sleep together; wake what sleeps, and name both, or none"
            raise refused(FaultCode.BAD_MESSAGE, text, tags=", ".join(in_order(tags)))
        # With requests to wait for, it takes as long as they do; the caller bounds it.
        limit_s = WAIT_S if mode is PauseMode.WAIT else MOVE_S
        # Before they are gone: neither a deadline nor the death of this process comes between the two.
        label = await self._label_torn() if level > 1 else None
        before = self.asleep, self.is_known
        self.go_on(TAGS)
        try:
            await self._calls.hold(f"Sleep {level}", lambda: self._control.sleep(level, mode, limit_s), limit_s)
        except FaultError as exc:
            if exc.code in REFUSALS:  # nothing has happened, for certain
                self.asleep, self.is_known = before
                if label is not None:
                    await self._label(label)
            raise
        return SleepData(asleep=in_order(self.asleep))

    async def wake_up(self, tags: frozenset[SleepTag], *, is_unfit: bool = False) -> SleepData:
        """See `SleepEngine.wake_up`. `is_unfit`: the weights aren't to be generated on, whatever the label says.

        Cancel: what isn't known to be awake counts as asleep.
        """
        asleep = self.asleep if self.is_known else TAGS  # one that only stands still takes a wake as well
        waking = tags & asleep
        if not waking:
            return SleepData(asleep=in_order(asleep))
        is_last = waking == asleep
        if is_last and is_unfit:
            text = "the engine would generate on torn weights or a torn draft; wake them, update, then wake the rest"
            text += "; a draft that no update reaches here takes a restart of the server"
            raise refused(FaultCode.WRONG_STATE, text, asleep=", ".join(in_order(asleep)))
        if is_last and await self._calls.ask("GetWeightVersion", self._control.get_version, CALL_S) == TORN:
            text = "the engine would generate with discarded weights; wake them, update, and then wake the KV cache"
            raise refused(FaultCode.WRONG_STATE, text, asleep=", ".join(in_order(asleep)))
        self.go_on(asleep)
        names = in_order(waking)
        await self._calls.hold("WakeUp", lambda: self._control.wake_up(names, MOVE_S), MOVE_S)
        if is_last:
            await self._pausing.pause(PauseMode.KEEP, False)
        self.asleep -= waking
        return SleepData(asleep=in_order(self.asleep))

    async def _label_torn(self) -> str:
        """The label that the weights had. Raises UpdateFailedError: it isn't set, and nothing has happened to them.
        Cancel: as that.
        """
        try:
            label = await self._calls.ask("GetWeightVersion", self._control.get_version, CALL_S)
        except FaultError as exc:
            raise UpdateFailedError(exc.fault, weights_touched=False) from exc
        try:
            await self._label(TORN)
        except BaseException as exc:
            with contextlib.suppress(FaultError):  # it may have been set all the same
                await self._label(label)
            if isinstance(exc, FaultError):
                raise UpdateFailedError(exc.fault, weights_touched=False) from exc
            raise
        return label

    async def _label(self, label: str) -> None:
        await self._calls.ask("UpdateWeightVersion", lambda: self._control.set_version(label), CALL_S)
