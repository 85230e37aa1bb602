"""An engine without a model: it keeps the whole contract of `base`, deterministically, and fails where it is told to.

For tests, and for simulating large fleets. Weights are a version per tensor, and checksums are those of
`rlbus.transfer.fake`, so that a whole update is verified end to end without torch. What a real engine would suffer in
silence (a step over half-written weights, a second session) is noted in `violations`.
"""

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlbus.errors import EngineDeadError, EngineError, error_from_fault, refused
from rlbus.files import read_file
from rlbus.schemas import (
    DRAFT_ROUTE,
    LORA_ROUTES,
    ChecksumsData,
    Fault,
    FaultCode,
    Generation,
    GroupPlan,
    JoinedData,
    PausedData,
    PauseMode,
    RankSpan,
    ReceivedData,
    SleepData,
    SleepTag,
    TensorSpec,
    TensorSum,
    Version,
)
from rlbus.transfer.fake import fake_sum
from rlbus.transfer.manifest import compare, num_bytes
from rlbus.workers.engines.base import EngineInfo, Observed, ProgressFn, ReadyFn, ReceiveOrder, UpdateFailedError
from rlbus.workers.engines.fake_draft import WithDraft
from rlbus.workers.engines.fake_loras import DEFAULT_CAPACITY, FakeLoras, WithLoras
from rlbus.workers.engines.fake_memory import FakeMemory
from rlbus.workers.engines.fake_native import NATIVE_ROUTES, WithNative
from rlbus.workers.engines.fake_requests import FakeRequest, Scheduler
from rlbus.workers.engines.fake_script import FakeScript, Step
from rlbus.workers.engines.lora import LoraInfo
from rlbus.workers.engines.sleep import in_order

ROUTES = frozenset(
    {
        "pause_generation",
        "resume_generation",
        "flush_cache",
        "abort_request",
        "update_weights_from_distributed",
        "update_weights_from_disk",
        "get_weight_checksums",
        "set_weight_version",
        "sleep",
        "wake_up",
        *LORA_ROUTES,
        *NATIVE_ROUTES,
    }
)
# What it can do with adapters unless it is told otherwise.
LORAS = LoraInfo(DEFAULT_CAPACITY, can_hot_swap=True)
DEFAULT_TENSORS = (
    TensorSpec(name="embed.weight", dtype="float32", shape=(64, 16)),
    TensorSpec(name="layers.0.weight", dtype="float32", shape=(16, 16)),
    TensorSpec(name="layers.1.weight", dtype="float32", shape=(16, 16)),
    TensorSpec(name="lm_head.weight", dtype="float32", shape=(64, 16)),
)
# Calls that are remembered for tests to look at.
MAX_CALLS = 1000
CHECKPOINT = "fake_weights.json"
# Bytes of the fake KV cache; the weights have as many as the tensors.
KV_CACHE_BYTES = 1 << 20
# What discarded weights hold.
GARBAGE = Version(incarnation=0, step=-1)
INITIAL = Version(incarnation=0, step=0)

Feed = Callable[[ReceiveOrder], Awaitable[int | None]]


class FakeEngine(WithLoras, WithNative, WithDraft):
    """A fake engine; see the module. `calls` has the verbs in the order of their begin, `violations` what went wrong.

    Args:
        step_s: how long a step takes.
        feed: the sender's side of a transfer, awaited once the receiver stands: how many tensors it sends before it
            gives up, or None for all. Without one everything is there at once.
        draft_tensors: those of its draft model; with none it has no such model.
    """

    def __init__(
        self,
        script: FakeScript | None = None,
        *,
        model: str = "fake-model",
        world_size: int = 1,
        tensors: Sequence[TensorSpec] = DEFAULT_TENSORS,
        routes: frozenset[str] = ROUTES,
        step_s: float = 0.01,
        completions_url: str | None = None,
        feed: Feed | None = None,
        loras: LoraInfo = LORAS,
        draft_tensors: Sequence[TensorSpec] = (),
    ) -> None:
        self._feed = feed
        routes = routes | {DRAFT_ROUTE} if draft_tensors else routes
        self._script = FakeScript() if script is None else script
        self._info = EngineInfo("fake", model, world_size, routes, ("fake",), completions_url=completions_url)
        self.tensors = tuple(tensors)
        self.calls: deque[str] = deque(maxlen=MAX_CALLS)
        self.violations: list[str] = []
        self._num_calls: dict[str, int] = {}
        # Which version each tensor's bytes belong to; more than one value means torn.
        self.held: dict[str, Version] = {spec.name: INITIAL for spec in self.tensors}
        self.draft_tensors = tuple(draft_tensors)
        self.draft_held = {spec.name: INITIAL for spec in self.draft_tensors}
        self._signature = self._sign()
        self.label: Version | None = None
        self.epoch: int | None = None
        self.session: ReceiveOrder | None = None
        self._is_received = False
        # What another trainer's transfer was begun with, and whether an update of it is open.
        self.native_info: dict[str, Any] | None = None
        self.is_native_open = self._has_native_part = False
        self._is_dead = False
        # Set by `aclose`.
        self.is_closed = False
        # Set when a hanging call is to be let go.
        self._released = asyncio.Event()
        sizes = {SleepTag.WEIGHTS: sum(num_bytes(s) for s in self.tensors), SleepTag.KV_CACHE: KV_CACHE_BYTES}
        self.memory = FakeMemory(sizes, self.violations.append)
        self.requests = Scheduler(self._step_signature, step_s)
        self.loras = FakeLoras(self.requests, loras)

    @property
    def info(self) -> EngineInfo:
        """Constant."""
        return self._info

    async def start(self) -> None:
        """See `Engine`."""
        await self._play("start")

    async def aclose(self) -> None:
        """See `Engine`."""
        self.is_closed = True
        self._released.set()
        await self.requests.aclose()

    async def observe(self) -> Observed:
        """See `Engine`."""
        await self._play("observe")
        generation = Generation.PAUSED if self.requests.is_paused else Generation.RUNNING
        label = None if self.label is None else str(self.label)
        num_requests = len(self.requests.running) + len(self.requests.waiting)
        return Observed(generation, label, num_requests, self.memory.asleep)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """See `Engine`."""
        step = self._note("pause")
        if step.does_it:
            await self.requests.pause(mode, clear_cache)
        await self._play_step(step)
        return await self.requests.pause(mode, clear_cache)

    async def resume(self) -> None:
        """See `Engine`."""
        await self._play("resume")
        if self.memory.asleep:
            self.violations.append(f"resume while {', '.join(in_order(self.memory.asleep))} sleeps")
        self.requests.resume()

    async def flush_cache(self) -> None:
        """See `Engine`."""
        await self._play("flush_cache")
        self.requests.flush()

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """See `Engine`."""
        await self._play("abort")
        return self.requests.abort(request_ids)

    def check_manifest(self, tensors: Sequence[TensorSpec]) -> None:
        """See `Engine`."""
        self._note("check_manifest")
        compare(self.tensors, tensors)

    async def join_group(self, plan: GroupPlan, span: RankSpan) -> JoinedData:
        """See `Engine`. There is no collective: the plan is believed."""
        self.epoch = None
        self._released.clear()
        if span.num_ranks != self._info.world_size:
            problem = f"{span.num_ranks} ranks for a world size of {self._info.world_size}"
            raise error_from_fault(Fault(code=FaultCode.GROUP_FAILED, message=problem))
        await self._play("join_group")
        self.epoch = plan.epoch
        ranks = tuple(range(span.first, span.first + span.num_ranks))
        return JoinedData(epoch=plan.epoch, ranks=ranks, world_size=plan.world_size)

    async def leave_group(self) -> None:
        """See `Engine`."""
        self._note("leave_group")
        self.epoch = None
        self._released.set()

    async def receive_weights(self, order: ReceiveOrder, on_ready: ReadyFn, on_progress: ProgressFn) -> ReceivedData:
        """See `Engine`. Nothing is waited for: the bytes of `order.version` are known."""
        step = self._note("receive_weights")
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(step.latency_s)
        self._check_may_receive(order)
        self.session, self._is_received = order, False
        self._released.clear()
        on_ready()
        if not step.skips:
            await self._bring(order, step, on_progress)
        self._is_received = True
        held = self.draft_held if order.is_draft else self.held
        sums = () if step.skips else tuple(_sum(spec, held, step.wrong_sum_of) for spec in order.tensors)
        return ReceivedData(
            num_bytes=0 if step.skips else sum(num_bytes(spec) for spec in order.tensors),
            num_tensors=len(sums),
            sums=sums,
            receive_s=asyncio.get_running_loop().time() - began_s,
            load_s=0.0,
        )

    async def finish_update(self, version: Version) -> None:
        """See `Engine`."""
        step = self._note("finish_update")
        await asyncio.sleep(step.latency_s)
        if self.session is None or not self._is_received or self.session.version != version:
            raise UpdateFailedError(_failed(f"no received update to {version}"), weights_touched=False)
        if step.fault is not None:
            raise UpdateFailedError(step.fault, step.claims_touched is not False)
        await self._deviate(step)
        self.label = self.label if self.session.is_draft else version
        self.session = None

    async def abort_update(self) -> None:
        """See `Engine`."""
        await self._play("abort_update")
        self._released.set()
        self.session, self.is_native_open = None, False

    async def check_checkpoint(self, path: str) -> None:
        """See `Engine`."""
        await self._play("check_checkpoint")
        try:
            self._read(path)
        except (OSError, ValueError, TypeError) as exc:
            raise refused(FaultCode.MANIFEST_MISMATCH, _unread(path, exc), path=path) from exc

    async def checkpoint_sums(self, path: str) -> tuple[TensorSum, ...]:
        """See `Engine`. Those of a transfer of the same version."""
        await self._play("checkpoint_sums")
        content = self._read(path)
        return tuple(TensorSum(name=t.name, checksum=fake_sum(t.name, content, t.shape)) for t in self.tensors)

    async def load_weights(self, path: str, version: Version) -> None:
        """See `Engine`. Reads what `save` wrote."""
        step = self._note("load_weights")
        await asyncio.sleep(step.latency_s)
        try:
            content = self._read(path)
        except (OSError, ValueError, TypeError) as exc:
            raise UpdateFailedError(_failed(_unread(path, exc)), weights_touched=False) from exc
        for index, spec in enumerate(self.tensors):
            if index == step.after_parts and step.fault is not None:
                raise UpdateFailedError(step.fault, _claim(step, index > 0))
            if index == step.after_parts:
                await self._deviate(step)
            self._write(spec, content)
        self.session, self.label = None, version

    async def label_weights(self, version: Version) -> None:
        """See `LabelEngine`."""
        await self._play("label_weights")
        self.label = version

    async def checksums(self) -> ChecksumsData:
        """See `Engine`."""
        await self._play("checksums")
        self.memory.touch(SleepTag.WEIGHTS, "checksums")
        return ChecksumsData(algorithm="fake", sums=tuple(_sum(spec, self.held, None) for spec in self.tensors))

    @property
    def sleep_tags(self) -> frozenset[SleepTag]:
        """See `SleepEngine`."""
        return self.memory.tags

    async def sleep(self, tags: frozenset[SleepTag], level: int, mode: PauseMode) -> SleepData:
        """See `SleepEngine`. Fails, if told to, when the memory is gone."""
        step = self._note("sleep")
        await asyncio.sleep(step.latency_s)
        paused = await self.requests.pause(mode, clear_cache=True)
        num_freed = self.memory.sleep(tags, level)
        if self.memory.is_discarded:
            self.held = dict.fromkeys(self.held, GARBAGE)
            self.draft_held = dict.fromkeys(self.draft_held, GARBAGE)
            self._signature = self._sign()
        if step.fault is not None:
            raise error_from_fault(step.fault)
        await self._deviate(step)
        asleep = in_order(self.memory.asleep)
        return SleepData(asleep=asleep, num_bytes=num_freed, num_aborted=paused.num_aborted)

    async def wake_up(self, tags: frozenset[SleepTag]) -> SleepData:
        """See `SleepEngine`. Fails, if told to, before anything has woken."""
        await self._play("wake_up")
        num_taken = self.memory.wake(tags)
        return SleepData(asleep=in_order(self.memory.asleep), num_bytes=num_taken)

    # --- beyond the seam, for tests and simulations

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        num_tokens: int,
        on_token: Callable[[], None] | None = None,
        model: str | None = None,
    ) -> FakeRequest:
        """Take a request, as its OpenAI route would; `model` may name an adapter. Raises UnknownModelError."""
        adapter = None if model is None else self.loras.choose(model, self._info.model)
        return self.requests.submit(request_id, prompt, num_tokens, on_token, adapter)

    @staticmethod
    def save(folder: Path, version: Version) -> None:
        """Write a checkpoint that `load_weights` takes."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"incarnation": version.incarnation, "step": version.step})
        (folder / CHECKPOINT).write_text(text)

    @property
    def is_torn(self) -> bool:
        """Whether tensors of several versions are held."""
        return len(set(self.held.values())) > 1

    # --- within

    def _read(self, path: str) -> Version:
        """What `save` wrote."""
        return Version(**json.loads(read_file(Path(path) / CHECKPOINT)))

    def _note(self, verb: str) -> Step:
        """Count a call; the step that is scripted for it."""
        if self._is_dead:
            raise _dead()
        if verb != "list_loras":  # a question, which nobody counts
            self.calls.append(verb)
        self._num_calls[verb] = self._num_calls.get(verb, 0) + 1
        return self._script.step(verb, self._num_calls[verb])

    async def _play(self, verb: str) -> None:
        """A call without bytes: latency, then what is scripted."""
        await self._play_step(self._note(verb))

    async def _play_step(self, step: Step) -> None:
        if step.latency_s:
            await asyncio.sleep(step.latency_s)
        if step.fault is not None:
            raise error_from_fault(step.fault)
        await self._deviate(step)

    async def _deviate(self, step: Step) -> None:
        if step.dies:
            self._die()
        if step.hangs:
            self._released.clear()
            await self._hang(step)
            raise EngineError(_failed("let go"))

    async def _hang(self, step: Step) -> None:
        try:
            await self._released.wait()
        except asyncio.CancelledError:
            if step.clings_s:
                await asyncio.sleep(step.clings_s)
            raise

    def _die(self) -> NoReturn:
        self._is_dead = True
        raise _dead()

    def _check_may_receive(self, order: ReceiveOrder) -> None:
        if self.epoch is None or self.epoch != order.epoch:
            problem = f"not in group {order.epoch}, but in {self.epoch}"
            raise UpdateFailedError(_lost(problem), weights_touched=False)
        if not self.requests.is_paused:
            self.violations.append("receive_weights while running")
        if self.session is not None:
            self.violations.append(f"receive_weights while {self.session.update_op_id} is open")

    async def _bring(self, order: ReceiveOrder, step: Step, on_progress: ProgressFn) -> None:
        """The transfer itself, in parts, with the scripted end after one of them."""
        total = sum(num_bytes(spec) for spec in order.tensors)
        num_tensors = await self._fed(order)
        done = 0
        for part in range(step.num_parts + 1):
            if part == step.after_parts:
                await self._spoil(step, is_touched=part > 0)
            if part == step.num_parts:
                return
            await asyncio.sleep(step.transfer_s / step.num_parts)
            for spec in order.tensors[part :: step.num_parts]:
                if num_tensors == 0:
                    raise UpdateFailedError(_lost("the sender gave up"), _claim(step, done > 0))
                num_tensors = None if num_tensors is None else num_tensors - 1
                self._write(spec, order.version, order.is_draft)
                done += num_bytes(spec)
            on_progress(done, total)

    async def _spoil(self, step: Step, is_touched: bool) -> None:
        if step.fault is not None:
            raise UpdateFailedError(step.fault, _claim(step, is_touched))
        if step.dies:
            self._die()
        if step.hangs:
            await self._hang(step)
            raise UpdateFailedError(_lost("the group was dropped during the transfer"), _claim(step, is_touched))

    async def _fed(self, order: ReceiveOrder) -> int | None:
        """What the sender has for us; fails untouched if the group is dropped while we wait for it."""
        if self._feed is None:
            return None
        feeding = asyncio.ensure_future(self._feed(order))
        released = asyncio.ensure_future(self._released.wait())
        try:
            await asyncio.wait({feeding, released}, return_when=asyncio.FIRST_COMPLETED)
            if not feeding.done():
                raise UpdateFailedError(_lost("the group was dropped before the first byte"), weights_touched=False)
            return feeding.result()
        finally:
            feeding.cancel()
            released.cancel()

    def _write(self, spec: TensorSpec, version: Version, is_draft: bool = False) -> None:
        if self.requests.is_in_step:
            self.violations.append(f"{spec.name} was written during a step")
        self.memory.touch(SleepTag.WEIGHTS, f"{spec.name} was written")
        (self.draft_held if is_draft else self.held)[spec.name] = version
        self.memory.is_discarded = GARBAGE in self.held.values()
        self._signature = self._sign()

    def _step_signature(self) -> str:
        """What a step generates with: it reads weights and writes KV entries."""
        self.memory.touch(SleepTag.WEIGHTS, "a step")
        self.memory.touch(SleepTag.KV_CACHE, "a step")
        if self.memory.is_discarded:
            self.violations.append("a step on discarded weights")
        return self._signature

    def _sign(self) -> str:
        text = "|".join(str(version) for version in self.held.values())
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sum(spec: TensorSpec, held: dict[str, Version], wrong: str | None) -> TensorSum:
    checksum = fake_sum(spec.name, held[spec.name], spec.shape)
    if spec.name == wrong:
        checksum = "0" * 15 + ("1" if checksum[-1] == "0" else "0")
    return TensorSum(name=spec.name, checksum=checksum)


def _claim(step: Step, is_touched: bool) -> bool:
    return is_touched if step.claims_touched is None else step.claims_touched


def _unread(path: str, exc: Exception) -> str:
    why = exc.strerror if isinstance(exc, OSError) and exc.strerror else f"it is garbled ({type(exc).__name__})"
    return f"{path} is no folder that a fake engine can load: {CHECKPOINT}: {why}"


def _failed(message: str) -> Fault:
    return Fault(code=FaultCode.ENGINE_FAILED, message=message)


def _lost(message: str) -> Fault:
    return Fault(code=FaultCode.TRANSFER_FAILED, message=message)


def _dead() -> EngineDeadError:
    return EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message="the engine is dead"))
