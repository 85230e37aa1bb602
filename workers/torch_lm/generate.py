"""Generation in a thread of its own: it steps while there are requests, and stands still between steps when told to.

Invariants: weights, caches and the KV pool are used by the stepping thread within a step only; everybody else
touches them between steps, under the lock. A request's own KV is computed again after a flush, so that nothing of
older weights outlives one.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlbus.errors import ClosedError, EngineDeadError, RLBusError
from rlbus.schemas import Fault, FaultCode, PausedData, PauseMode
from rlbus.transfer.bounded import run_in_thread
from rlbus.workers.torch_lm.adapter import Adapter, LoraBatch
from rlbus.workers.torch_lm.adapters import AdapterTable, Loaded
from rlbus.workers.torch_lm.model import CausalLM
from rlbus.workers.torch_lm.prefixes import PrefixCache
from rlbus.workers.torch_lm.sampling import Chosen, Sampling, choose, new_generator
from rlbus.workers.torch_lm.schedule import MAX_REQUESTS, MAX_RUNNING, Request, Schedule, VersionSpan

_log = logging.getLogger("rlbus.workers")

# How long `close` waits for the step that runs.
CLOSE_S = 5.0
# Adapters that a model has beside it at most, unless it is told otherwise.
MAX_ADAPTERS = 8
# How often one who waits for a step boundary looks whether the thread still lives.
_WATCH_S = 0.5


class RequestError(RLBusError):
    """A request can't be taken. `problem` says why; nothing was done for it."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class UnknownModelError(RequestError):
    """There is no adapter of that name, or it takes no new requests."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended, see `Request`."""

    request_id: str
    chosen: tuple[Chosen, ...]
    finish: str
    spans: tuple[VersionSpan, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The generated ones, a stop token included."""
        return tuple(c.token for c in self.chosen)


@dataclass(slots=True)
class _Row:
    """What the thread keeps of a running request: its place in the pool, and how many tokens are computed there."""

    slot: int
    num_computed: int
    generator: torch.Generator


class Generation:
    """The generating side of one model. What isn't a coroutine returns at once (but `close`), from any thread.

    Args:
        version: label of the weights as they are; None as long as nobody named them.
        max_adapters: how many may be loaded at once.
    """

    def __init__(self, model: CausalLM, *, version: str | None = None, max_adapters: int = MAX_ADAPTERS) -> None:
        self._model = model
        self._version = version
        # New with every change of the weights, see `prefixes`.
        self._weights = 0
        self._schedule = Schedule()
        self._rows: dict[Request, _Row] = {}
        self._pool = model.new_pool(MAX_RUNNING)
        self._prefixes = PrefixCache()
        self._adapters = AdapterTable(max_adapters)
        # What waits for a step boundary, in order.
        self._changes: list[Callable[[], None]] = []
        self._is_flush_wanted = False
        self._is_closed = False
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rlbus generation", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def close(self) -> None:
        """End all requests, and the thread after its step. Blocks for at most CLOSE_S. Idempotent."""
        with self._changed:
            self._is_closed = True
            ended = self._schedule.abort(None)
            self._changed.notify_all()
        _tell(ended)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    # --- state

    @property
    def version(self) -> str | None:
        """Label of the weights."""
        return self._version

    @property
    def is_still(self) -> bool:
        """Paused, and no step runs or will."""
        return self._schedule.is_still

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return self._schedule.num_requests

    @property
    def prefixes(self) -> PrefixCache:
        """For its counts."""
        return self._prefixes

    def check_alive(self) -> None:
        """Raise EngineDeadError unless the thread lives."""
        if not self._thread.is_alive():
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message="the generating thread has ended"))

    def relabel(self, version: str | None) -> None:
        """The weights have changed, or will with the next byte. What was cached can't serve any more."""
        with self._changed:
            self._version = version
            self._weights += 1

    # --- requests

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str | None = None,
        on_token: Callable[[], None] | None = None,
        adapter: str | None = None,
    ) -> Finished:
        """Generate until its end, also across pauses. `on_token` is called on this loop for each token. `adapter` is
        the model name of one, None for the base model.

        Raises:
            UnknownModelError: no such adapter.
            RequestError: the prompt is empty, too long or has unknown tokens; too many requests; the id is taken.
            ClosedError: the engine is closed.
        Cancel: the request is aborted.
        """
        self._check(prompt, sampling)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        num_told = 0

        def look() -> None:
            nonlocal num_told
            while on_token is not None and num_told < len(request.chosen):
                num_told += 1
                on_token()
            if request.finish is not None and not ended.done():
                ended.set_result(None)

        def on_change() -> None:
            is_wanted = request.finish is not None or on_token is not None
            if is_wanted and not loop.is_closed():  # a closed loop has nobody left who waits
                loop.call_soon_threadsafe(look)

        name = f"cmpl-{next(self._ids)}" if request_id is None else request_id
        request = Request(name, tuple(prompt), sampling, on_change)
        self._submit(request, adapter)
        try:
            await ended
        finally:
            if not ended.done() or ended.cancelled():
                self.abort((name,))
        assert request.finish is not None
        return Finished(name, tuple(request.chosen), request.finish, tuple(request.spans))

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        config = self._model.config
        if not prompt:
            raise RequestError("the prompt is empty")
        bad = next((token for token in prompt if not 0 <= token < config.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the vocabulary of {config.vocab_size}")
        total = len(prompt) + sampling.max_tokens
        if total > config.max_positions:
            raise RequestError(
                f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} are {total}; "
                f"the model's context is {config.max_positions}"
            )
        if sampling.num_top > config.vocab_size:
            raise RequestError(f"logprobs {sampling.num_top} is more than the vocabulary of {config.vocab_size}")

    def _submit(self, request: Request, adapter: str | None) -> None:
        with self._changed:
            if self._is_closed:
                raise ClosedError("the engine")
            if adapter is not None:
                request.adapter = self._adapters.find(adapter)
                if request.adapter is None:
                    raise UnknownModelError(f"the model {adapter!r} does not exist")
            if not self._schedule.submit(request):
                raise RequestError(f"request id {request.request_id!r} is taken, or over {MAX_REQUESTS} are held")
            self._changed.notify_all()

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """End those requests, or all; how many there were."""
        with self._changed:
            ended = self._schedule.abort(request_ids)
            self._changed.notify_all()
        _tell(ended)
        return len(ended)

    # --- adapters

    @property
    def adapters(self) -> AdapterTable:
        """To look at; changed by the methods below only."""
        return self._adapters

    def adapter_counts(self) -> tuple[tuple[Loaded, int], ...]:
        """Every adapter, and how many requests in flight name it."""
        with self._changed:
            return tuple((loaded, len(self._schedule.naming(loaded))) for loaded in self._adapters.all)

    def drain_adapter(self, name: str, revision: int, is_draining: bool) -> bool:
        """Take no new requests for it, or take them again; whether it is there."""
        with self._changed:
            loaded = self._adapters.get(name, revision)
            if loaded is not None:
                loaded.is_draining = is_draining
            return loaded is not None

    async def add_adapter(self, name: str, revision: int, adapter: Adapter, replaces: int | None) -> None:
        """Let requests name it; in the place of revision `replaces`, whose requests go on with it, computed anew.

        Raises: EngineDeadError. Cancel: it is done, or never will be.
        """

        def change() -> None:
            loaded = self._adapters.add(name, revision, adapter)
            old = None if replaces is None else self._adapters.get(name, replaces)
            if old is None:
                return
            self._adapters.remove(old)
            for request in self._schedule.naming(old):
                request.adapter = loaded
                if request in self._rows:
                    self._rows[request].num_computed = 0

        await self._change(change)

    async def remove_adapter(self, name: str, revision: int) -> int:
        """Let it go, and abort its requests; how many. Raises: EngineDeadError. Cancel: as `add_adapter`."""
        ended: list[Request] = []

        def change() -> None:
            loaded = self._adapters.get(name, revision)
            if loaded is not None:
                self._adapters.remove(loaded)
                ended.extend(self._schedule.abort([r.request_id for r in self._schedule.naming(loaded)]))

        try:
            await self._change(change)
        finally:
            _tell(ended)
        return len(ended)

    async def _change(self, change: Callable[[], None]) -> None:
        """Make it between two steps; one that its caller doesn't wait for any more isn't made later."""
        with self._changed:
            self._changes.append(change)
            if not self._schedule.is_in_step:
                self._make_changes()
        try:
            await self._at_boundary(lambda: change not in self._changes)
        finally:
            with self._changed:
                if change in self._changes:
                    self._changes.remove(change)

    def _make_changes(self) -> None:
        for change in self._changes:
            change()
        self._changes.clear()

    # --- verbs that wait for a step boundary

    async def pause(self, mode: PauseMode, clear_cache: bool) -> PausedData:
        """Return when no step runs and none will until `resume`. Idempotent.

        Raises: EngineDeadError. Cancel: the pause goes on.
        """
        with self._changed:
            ended = self._schedule.pause(mode)
            turn = self._schedule.num_turns
            self._changed.notify_all()
        _tell(ended)
        await self._at_boundary(lambda: self._schedule.is_still or self._schedule.num_turns != turn)
        if clear_cache:
            await self.flush()
        return self._schedule.paused_data(len(ended))

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._schedule.resume()
            self._changed.notify_all()

    async def flush(self) -> None:
        """Forget the prefixes, and what is computed of the requests that are held or run: it's computed again.

        Raises: EngineDeadError. Cancel: it is done at the next boundary.
        """
        with self._changed:
            self._is_flush_wanted = True
            if not self._schedule.is_in_step:
                self._flush()
        await self._at_boundary(lambda: not self._is_flush_wanted)

    def release_cache(self) -> int:
        """Free the KV pool and the prefixes; what is held is computed again afterwards. It has to stand still.

        The bytes that it freed. Idempotent.
        """
        with self._changed:
            assert self._schedule.is_still
            self._flush()
            return self._pool.release()

    def restore_cache(self) -> int:
        """Take the memory of the KV pool again; before `resume`. The bytes that it took. Idempotent."""
        with self._changed:
            return self._pool.restore()

    async def _at_boundary(self, is_reached: Callable[[], bool]) -> None:
        def wait() -> None:
            with self._changed:
                while not is_reached() and not self._is_closed:
                    self.check_alive()
                    self._changed.wait(_WATCH_S)

        if not is_reached():
            await run_in_thread(wait, name="rlbus step boundary")

    # --- within the thread

    def _run(self) -> None:
        # For this thread: a small model gains nothing from more, and spinning threads of several workers on few cores
        # cost 37 ms a step of 64 requests instead of 14 (measured on 2 cores).
        torch.set_num_threads(1)
        while True:
            with self._changed:
                while not self._is_closed and not self._schedule.is_due:
                    self._changed.wait()
                if self._is_closed:
                    return
                due = self._schedule.begin_step()
                self._drop_rows()
                weights, version = self._weights, self._version
            try:
                chosen = self._step(due, weights)
            except Exception:  # noqa: BLE001 - who asked gets finish "error", the log the rest; weights are as before
                _log.exception("a step of %d requests failed", len(due))
                chosen = None
            with self._changed:
                for index, request in enumerate(due):
                    if chosen is None:
                        self._schedule.end(request, "error")
                    else:
                        self._schedule.add(request, chosen[index], version, self._model.config.eos_token_ids)
                self._schedule.end_step()
                if self._is_flush_wanted:
                    self._flush()
                self._make_changes()
                self._changed.notify_all()
            _tell(due)

    def _drop_rows(self) -> None:
        """Give back the slots of requests that have ended."""
        for request in [r for r in self._rows if r.finish is not None]:
            self._pool.give(self._rows.pop(request).slot)

    def _flush(self) -> None:
        self._prefixes.clear()
        for row in self._rows.values():
            row.num_computed = 0
        self._is_flush_wanted = False

    def _step(self, due: Sequence[Request], weights: int) -> list[Chosen]:
        """One token for each: texts with more than their last token to compute one by one, the others as a batch."""
        logits: dict[Request, torch.Tensor] = {}
        batch: list[Request] = []
        for request in due:
            row = self._row(request)
            length = len(request.prompt) + len(request.chosen)
            if row.num_computed == length - 1 and row.num_computed > 0:
                batch.append(request)
            else:
                logits[request] = self._prefill(request, row, weights)
        if batch:
            rows = [self._rows[request] for request in batch]
            tokens = torch.tensor([[request.chosen[-1].token] for request in batch])
            positions = torch.tensor([[row.num_computed] for row in rows])
            lora = LoraBatch.of([None if r.adapter is None else r.adapter.adapter for r in batch])
            out = self._model.step(tokens, positions, torch.tensor([row.slot for row in rows]), self._pool, lora)
            for request, row, line in zip(batch, rows, out, strict=True):
                row.num_computed += 1
                logits[request] = line
        rows_logits = torch.stack([logits[request] for request in due])
        return choose(rows_logits, [r.sampling for r in due], [self._rows[r].generator for r in due])

    def _row(self, request: Request) -> _Row:
        row = self._rows.get(request)
        if row is None:
            row = self._rows[request] = _Row(self._pool.take(), 0, new_generator(request.sampling))
        return row

    def _prefill(self, request: Request, row: _Row, weights: int) -> torch.Tensor:
        """Compute a whole text but for what the prefix cache has of it."""
        text = [*request.prompt, *request.tokens]
        adapter = request.adapter
        key = (weights, 0 if adapter is None else adapter.number)
        lora = None if adapter is None else LoraBatch.of([adapter.adapter])
        start = self._prefixes.load(key, text, self._pool, row.slot)
        tokens = torch.tensor([text[start:]])
        positions = torch.arange(start, len(text))[None]
        out = self._model.step(tokens, positions, torch.tensor([row.slot]), self._pool, lora)
        row.num_computed = len(text)
        self._prefixes.keep(key, request.prompt, self._pool, row.slot)
        return out[0]


def _tell(requests: Sequence[Request]) -> None:
    for request in requests:
        request.on_change()
