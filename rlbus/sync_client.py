"""`BusWeightSyncClient`: vLLM's `VLLMWeightSyncClient` for a whole fleet.

```python
with BusWeightSyncClient("nats://...", namespace="prod") as client:
    engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)  # vLLM's own
    engine.send_weights()
```
vLLM's trainer engines talk to one server through an object with four methods (structural: nothing of vLLM is imported
here). This one talks to every worker of a fleet, whatever engine it has, through the controller: one `init_info`
becomes the right rank offset for each worker, `start_weight_update` holds the fleet still, `finish_weight_update` gives
it the new version and lets it go. A worker that fails ends the step on all, and the exception says which it was.
"""

import json
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from rlbus.client import EVERYBODY, TRANSFER_DEADLINE_S
from rlbus.errors import ClosedError, ConfigError
from rlbus.reports import raise_for_report
from rlbus.schemas import FleetView, PauseMode, Report, Target, TransferStep, Version
from rlbus.schemas.weights import MAX_VERSION_NUMBER
from rlbus.session import Session, connect
from rlbus.sync import LoopThread

MAX_DIGITS = len(str(MAX_VERSION_NUMBER))
T = TypeVar("T")

# One entry for every rank of the fleet, or one for all; as vLLM's `WeightTransferUpdatePayload`.
UpdateInfo = dict[str, Any] | list[dict[str, Any]]


class BusWeightSyncClient:
    """Use it in a `with` statement: that connects, and closes at the end. Methods block, and may be called from any
    thread: vLLM's NCCL engine calls `update_weights` on one while it broadcasts on another.

    What isn't given comes from the environment (RLBUS_URL, RLBUS_NAMESPACE, ...; see `rlbus.config`).

    Args:
        target: which workers; all of the namespace by default.
        pause_mode: what happens to requests in flight while the fleet stands still.
        deadline_s: how long one step may take.

    Raises (every method): RefusedError tree: nothing changed (no such route, the fleet has changed since init, ...).
        PartialError: it failed on a worker; `report` has one outcome for each. DeadlineError. BrokenError: no
        controller. ClosedError: outside of the `with` statement, or it was left meanwhile.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        token: str | None = None,
        caller: str | None = None,
        target: Target = EVERYBODY,
        pause_mode: PauseMode | str = PauseMode.KEEP,
        deadline_s: float = TRANSFER_DEADLINE_S,
    ) -> None:
        self._connection = connect(url, namespace=namespace, token=token, caller=caller)
        self._target = target
        self._pause_mode = pause_mode
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._session: Session | None = None
        # How the last step ended, well or not; None before the first, and where a step raised without a report.
        self.report: Report | None = None

    def __enter__(self) -> "BusWeightSyncClient":
        """Connect. Raises: ConfigError, BrokenError: see `rlbus.connect`. ClosedError: entered a second time."""
        if self._loop is not None:
            raise ClosedError("weight sync client")
        self._loop = LoopThread("rlbus-sync-client")
        try:
            self._session = self._loop.call(self._open())
        except BaseException:
            self._loop.stop()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. The group stays; `shutdown_weight_transfer_engine` ends it. Idempotent.

        A step that another thread waits for is taken back first, in at most 5 s, and raises ClosedError there.
        """
        with self._lock:
            session, self._session = self._session, None
        if self._loop is None or session is None:
            return
        try:
            if self._loop.is_alive:
                self._loop.call(self._connection.__aexit__(None, None, None))
        finally:
            self._loop.stop()

    # -- vLLM's four methods ------------------------------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every worker join the trainer's group. Blocks until all have joined.

        A `rank_offset` in it is that of the first worker; its `world_size` has to be that plus all ranks of the fleet
        (`world_size()` says how many).
        """
        self._take(TransferStep.INIT, init_info)

    def start_weight_update(self) -> None:
        """Hold the fleet still and open the update on every worker."""
        self._take(TransferStep.START)

    def update_weights(self, update_info: UpdateInfo) -> None:
        """Let every worker receive what this describes. Blocks until all have it."""
        self._take(TransferStep.UPDATE, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make it the fleet's weights, and let it generate.

        The version is `STEP` or `INCARNATION.STEP`; None: the fleet's next.

        Raises: ConfigError: another text, which could not be compared with the fleet's.
        """
        version = None if weight_version is None else version_of(weight_version)
        self._take(TransferStep.FINISH, version=version)

    # -- beside them --------------------------------------------------------------------------------------------------

    def shutdown_weight_transfer_engine(self) -> None:
        """Let every worker leave the group. An open update is given up; whoever isn't torn by it generates again."""
        self._take(TransferStep.SHUTDOWN)

    def world_size(self) -> int:
        """Ranks of the live workers: what a trainer adds its own to for the group's `world_size`."""
        view: FleetView = self._call(self._client().fleet.status())
        chosen = [m.descriptor for m in view.members if m.liveness.value in ("alive", "suspect")]
        if self._target.components is not None:
            chosen = [d for d in chosen if d.component in self._target.components]
        if self._target.workers is not None:
            chosen = [d for d in chosen if f"{d.component}/{d.instance_id}" in self._target.workers]
        return sum(d.world_size for d in chosen)

    def _take(self, step: TransferStep, info: UpdateInfo | None = None, version: Version | None = None) -> None:
        try:
            text = None if info is None else json.dumps(info)
        except (TypeError, ValueError) as exc:
            problem = "can't travel as JSON; a backend within one process, such as CUDA IPC, isn't for a fleet"
            raise ConfigError("info", type(info).__name__, f"{problem} ({exc})") from exc
        fleet = self._client().fleet
        self.report = None
        report = self._call(
            fleet.transfer(
                step,
                text,
                self._target,
                version=version,
                pause_mode=self._pause_mode,
                deadline_s=self._deadline_s,
                check=False,
            )
        )
        self.report = report
        raise_for_report(report)

    def _client(self) -> Session:
        session = self._session
        if session is None:
            raise ClosedError("weight sync client")
        return session

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return self._loop.call(work)

    async def _open(self) -> Session:
        return await self._connection.__aenter__()


def version_of(text: str) -> Version:
    """`7` or `1.7` (incarnation.step) as a version. Raises ConfigError."""
    incarnation, _, step = text.rpartition(".")
    numbers = (incarnation or "0", step)
    if not all(_is_number(number) for number in numbers):
        problem = "use a step such as 7, or incarnation.step such as 1.7: versions are ordered here"
        raise ConfigError("weight_version", text, f"{problem}, by numbers up to {MAX_VERSION_NUMBER}")
    return Version(incarnation=int(numbers[0]), step=int(step))


def _is_number(text: str) -> bool:
    # The length first: Python refuses to read thousands of digits.
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS and int(text) <= MAX_VERSION_NUMBER
