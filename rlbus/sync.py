"""`rlbus.Trainer`: the trainer for ordinary training loops, without asyncio.

```python
with rlbus.Trainer("nats://...", namespace="prod") as trainer:
    trainer.wait_ready(world_size=16)
    report = trainer.update_weights(model, version=step)
```
The connection lives on an event loop of its own in a background thread; heartbeats and reconnects go on while the
training loop computes. Each method blocks its caller until it is done, may be called from any thread, and is ended by
Ctrl-C: the op is taken back, then KeyboardInterrupt goes on.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from rlbus._announcing import Weights
from rlbus._conversation import ProgressHandler
from rlbus.client import EVERYBODY, READY_DEADLINE_S
from rlbus.errors import BrokenError, ClosedError
from rlbus.lora_verbs import LOAD_DEADLINE_S, UNLOAD_DEADLINE_S
from rlbus.reports import UpdateReport
from rlbus.schemas import FleetView, OnFailure, PauseMode, Report, SleepTag, SnapshotKind, Target, Version
from rlbus.schemas.loras import DEFAULT_DRAIN_S
from rlbus.session import Session, connect
from rlbus.trainer import DEFAULT_BUCKET_BYTES, DEFAULT_STALL_S, UPDATE_DEADLINE_S
from rlbus.trainer import Trainer as AsyncTrainer
from rlbus.transfer.plane import SenderPlane

T = TypeVar("T")

# How long a call that was interrupted may take to undo what it began, and how long closing may take.
INTERRUPT_LIMIT_S = 30.0
CLOSE_LIMIT_S = 30.0
# How soon a waiting main thread sees a signal at the latest.
WAKE_S = 0.5


class LoopThread:
    """An event loop in a daemon thread, so that a script that forgets to close still ends."""

    def __init__(self, name: str) -> None:
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._stopping = asyncio.Event()
        self._is_stopped = False
        # What ended the loop though nobody stopped it.
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self._loop = self._started.result(CLOSE_LIMIT_S)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it. Ctrl-C cancels it, waits for its undoing, and is raised again.

        Raises: whatever `work` raises. ClosedError: after `stop`. BrokenError: the loop has died. RuntimeError: called
            from the loop's own thread (a callback), where it would wait for itself.
        """
        problem: Exception | None = None
        if threading.current_thread() is self._thread:
            problem = RuntimeError("called from a callback on rlbus' own thread, where it would wait for itself")
        elif not self._thread.is_alive():
            problem = self._broken()
        if problem is not None:
            work.close()
            raise problem from self._death
        call = _Call(work)
        try:
            # A signal may come at any of these steps, and finds the loop's side ahead of this one, or behind it.
            self._schedule(call.start)
            # In short waits: a signal that another thread received is seen by the main thread only when it wakes up.
            while not concurrent.futures.wait([call.ended], timeout=WAKE_S).done:
                if not self.is_alive:
                    raise self._broken() from self._death
            if self._death is not None:  # then it is cancelled, or has what ended the loop
                raise self._broken() from self._death
            if self._is_stopped and isinstance(call.ended.exception(), concurrent.futures.CancelledError):
                raise self._broken()  # it ran when the loop ended
            return call.ended.result()
        except BaseException:
            self._give_up(call)
            raise

    def _give_up(self, call: "_Call[Any]") -> None:
        """Let it undo what it began, if the loop still can."""
        if call.ended.done():
            return
        if self.is_alive:
            with contextlib.suppress(BrokenError, ClosedError):
                self._schedule(call.cancel)
                concurrent.futures.wait([call.ended], timeout=INTERRUPT_LIMIT_S)
                return
        self._thread.join(CLOSE_LIMIT_S)
        call.drop()

    @property
    def is_alive(self) -> bool:
        """Whether calls can be made."""
        return self._thread.is_alive() and self._death is None

    def _schedule(self, step: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(step)
        except RuntimeError as exc:  # closed since we looked
            raise self._broken() from (self._death or exc)

    def _broken(self) -> ClosedError | BrokenError:
        """Why no call can be made."""
        if self._death is None and self._is_stopped:
            return ClosedError("trainer")
        return BrokenError("rlbus' own thread", f"it has ended by {self._death!r}; open a new trainer")

    def stop(self) -> None:
        """End the loop and its thread, in at most CLOSE_LIMIT_S. Idempotent."""
        self._is_stopped = True
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(CLOSE_LIMIT_S)

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            self._started.set_result(runner.get_loop())
            try:
                runner.run(self._wait_for_stop())
            except BaseException as exc:  # noqa: BLE001 - whoever calls next gets it as the cause
                self._death = exc

    async def _wait_for_stop(self) -> None:
        await self._stopping.wait()


class _Call(Generic[T]):
    """A coroutine that another thread waits for. `start` and `cancel` are called on the loop, `drop` after its end."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        # Comes to its end only when the coroutine has: one that is cancelled undoes first what it began.
        self.ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Give up; what was never begun ends here."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._work.close()
            self.ended.set_exception(concurrent.futures.CancelledError())

    def drop(self) -> None:
        """The loop has ended, before it began this or after it."""
        if self._task is None:
            self._work.close()

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())


class Trainer:
    """The trainer without asyncio. Use it in a `with` statement: that connects, and closes at the end.

    What isn't given comes from the environment (RLBUS_URL, RLBUS_NAMESPACE, ...; see `rlbus.config`). Callbacks are
    called on rlbus' own thread and must not call back into the trainer.

    Args:
        url: "nats://host:port", with credentials in it or as `token`, `user` and `password`, or `creds_file`.
        backend, host, plane: the data plane, see `Session.trainer`.
        snapshot, snapshot_dir: what is kept for workers that come back, see `Session.trainer`. They are brought to the
            fleet's version on rlbus' own thread, between updates.
        connect_s: how long connecting may take.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        token: str | None = None,
        user: str | None = None,
        password: str | None = None,
        creds_file: str | None = None,
        connect_s: float | None = None,
        caller: str | None = None,
        backend: str = "auto",
        host: str | None = None,
        plane: SenderPlane | None = None,
        snapshot: SnapshotKind | str = SnapshotKind.NONE,
        snapshot_dir: Path | str | None = None,
    ) -> None:
        self._connection = connect(
            url,
            namespace=namespace,
            token=token,
            user=user,
            password=password,
            creds_file=creds_file,
            connect_s=connect_s,
            caller=caller,
        )
        self._backend, self._host, self._plane = backend, host, plane
        self._snapshot, self._snapshot_dir = snapshot, snapshot_dir
        self._loop: LoopThread | None = None
        self._trainer: AsyncTrainer | None = None

    def __enter__(self) -> "Trainer":
        """Connect.

        Raises: ConfigError, BrokenError: see `rlbus.connect`. ClosedError: entered a second time.
        """
        if self._loop is not None:
            raise ClosedError("trainer")
        self._loop = LoopThread("rlbus-trainer")
        try:
            self._trainer = self._loop.call(self._open())
        except BaseException:
            self._loop.stop()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group and disconnect, within 60 s. Idempotent.

        A call that another thread waits for is ended first, as by Ctrl-C there, and raises ClosedError. One that reads
        weights together with other ranks reads them to their end before, within 120 s.
        """
        if self._loop is None or self._trainer is None:
            return
        self._trainer = None
        try:
            if not self._loop.is_alive:
                return  # the connection died with its loop
            self._loop.call(self._connection.__aexit__(None, None, None))
        finally:
            self._loop.stop()

    @property
    def version(self) -> Version | None:
        """The last version that some worker took from us, None before the first."""
        return self._open_trainer()[1].version

    def wait_ready(
        self,
        *,
        world_size: int | None = None,
        num_workers: int | None = None,
        target: Target = EVERYBODY,
        deadline_s: float = READY_DEADLINE_S,
        on_progress: ProgressHandler | None = None,
    ) -> FleetView:
        """Wait for the fleet; see `rlbus.AsyncTrainer.wait_ready`, also for what it raises."""
        loop, trainer = self._open_trainer()
        return loop.call(
            trainer.wait_ready(
                world_size=world_size,
                num_workers=num_workers,
                target=target,
                deadline_s=deadline_s,
                on_progress=on_progress,
            )
        )

    def update_weights(
        self,
        weights: Weights,
        *,
        version: int | Version,
        incarnation: int = 0,
        target: Target = EVERYBODY,
        require: int | None = None,
        on_failure: OnFailure | str = OnFailure.RETRY,
        pause_mode: PauseMode | str = PauseMode.KEEP,
        reset_prefix_cache: bool = True,
        allow_rollback: bool = False,
        deadline_s: float = UPDATE_DEADLINE_S,
        stall_s: float = DEFAULT_STALL_S,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
        draft: bool = False,
    ) -> UpdateReport:
        """Give the fleet new weights; see `rlbus.AsyncTrainer.update_weights`, also for what it raises.

        The weights are read on another thread while this call waits.
        """
        loop, trainer = self._open_trainer()
        return loop.call(
            trainer.update_weights(
                weights,
                version=version,
                incarnation=incarnation,
                target=target,
                require=require,
                on_failure=on_failure,
                pause_mode=pause_mode,
                reset_prefix_cache=reset_prefix_cache,
                allow_rollback=allow_rollback,
                deadline_s=deadline_s,
                stall_s=stall_s,
                bucket_bytes=bucket_bytes,
                on_progress=on_progress,
                check=check,
                draft=draft,
            )
        )

    def load_lora(
        self,
        name: str,
        adapter: Path | str | Mapping[str, Any],
        *,
        config: Any = None,
        revision: int | None = None,
        shared: bool = False,
        target: Target = EVERYBODY,
        hot_swap: bool = False,
        evict_idle: bool = True,
        where_possible: bool = False,
        pause_mode: PauseMode | str = PauseMode.KEEP,
        deadline_s: float = LOAD_DEADLINE_S,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """Let requests name an adapter on every worker; see `rlbus.AsyncTrainer.load_lora`, also for what it raises."""
        loop, trainer = self._open_trainer()
        return loop.call(
            trainer.load_lora(
                name,
                adapter,
                config=config,
                revision=revision,
                shared=shared,
                target=target,
                hot_swap=hot_swap,
                evict_idle=evict_idle,
                where_possible=where_possible,
                pause_mode=pause_mode,
                deadline_s=deadline_s,
                on_progress=on_progress,
                check=check,
            )
        )

    def unload_lora(
        self,
        name: str,
        *,
        revision: int | None = None,
        drain_s: float = DEFAULT_DRAIN_S,
        target: Target = EVERYBODY,
        deadline_s: float = UNLOAD_DEADLINE_S,
        check: bool = True,
    ) -> Report:
        """Let an adapter go; see `rlbus.AsyncTrainer.unload_lora`."""
        loop, trainer = self._open_trainer()
        return loop.call(
            trainer.unload_lora(
                name, revision=revision, drain_s=drain_s, target=target, deadline_s=deadline_s, check=check
            )
        )

    def status(self) -> FleetView:
        """The controller's view of the fleet; see `rlbus.FleetClient.status`."""
        loop, trainer = self._open_trainer()
        return loop.call(trainer.fleet.status())

    def versions(self, target: Target = EVERYBODY) -> Report:
        """Ask each worker for its weights; each outcome's data is `WeightsData`. See `rlbus.FleetClient.versions`."""
        loop, trainer = self._open_trainer()
        return loop.call(trainer.fleet.versions(target))

    def pause(
        self,
        target: Target = EVERYBODY,
        *,
        mode: PauseMode | str = PauseMode.KEEP,
        lease_s: float | None = None,
    ) -> Report:
        """Hold engines still (for an evaluation, say), with a lease or without; see `rlbus.FleetClient.pause`."""
        loop, trainer = self._open_trainer()
        return loop.call(trainer.fleet.pause(target, mode=mode, lease_s=lease_s))

    def resume(self, target: Target = EVERYBODY) -> Report:
        """Let engines generate again; see `rlbus.FleetClient.resume`."""
        loop, trainer = self._open_trainer()
        return loop.call(trainer.fleet.resume(target))

    def sleep(
        self,
        target: Target = EVERYBODY,
        *,
        tags: Iterable[SleepTag | str] | None = None,
        level: int = 1,
        mode: PauseMode | str = PauseMode.ABORT,
    ) -> Report:
        """Let engines give their memory back, for the training step, say; see `rlbus.FleetClient.sleep`."""
        loop, trainer = self._open_trainer()
        return loop.call(trainer.fleet.sleep(target, tags=tags, level=level, mode=mode))

    def wake(self, target: Target = EVERYBODY, *, tags: Iterable[SleepTag | str] | None = None) -> Report:
        """Let engines take their memory again: the weights before an update, the rest after it; see
        `rlbus.FleetClient.wake`.
        """
        loop, trainer = self._open_trainer()
        return loop.call(trainer.fleet.wake(target, tags=tags))

    async def _open(self) -> AsyncTrainer:
        session: Session = await self._connection.__aenter__()
        try:
            return session.trainer(
                backend=self._backend,
                host=self._host,
                plane=self._plane,
                snapshot=self._snapshot,
                snapshot_dir=self._snapshot_dir,
            )
        except BaseException:
            await session.aclose()
            raise

    def _open_trainer(self) -> tuple[LoopThread, AsyncTrainer]:
        if self._loop is None or self._trainer is None:
            raise ClosedError("trainer (use it in a `with` statement)")
        return self._loop, self._trainer
