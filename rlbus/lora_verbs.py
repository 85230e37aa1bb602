"""What is asked of the controller about adapters (LoRA): load one on the whole fleet, unload it, list them.

```python
report = await fleet.load_lora("policy", "out/checkpoint-7")        # through the bus's store: no shared folder needed
report = await fleet.load_lora("policy", "/shared/policy/8", shared=True)   # every worker reads it there
```
Requests then name "policy@7", or "policy" for the newest revision.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

from rlbus._calls import Calls, one_call
from rlbus._conversation import ProgressHandler, check_finite
from rlbus._deadline import Deadline
from rlbus.adapter import AdapterError, adapter_sum
from rlbus.adapter_objects import THREAD, upload
from rlbus.bus import Bus
from rlbus.connecting import open_objects
from rlbus.errors import BusyError, ConfigError, RefusedError, RLBusError
from rlbus.schemas import (
    MAX_REVISION,
    FleetView,
    FolderSource,
    ListLoras,
    LoadLoraFleet,
    LoraSource,
    ObjectSource,
    PauseMode,
    Report,
    Target,
    UnloadLoraFleet,
    is_lora_name,
)
from rlbus.schemas.loras import DEFAULT_DRAIN_S, MAX_DRAIN_S
from rlbus.transfer.bounded import run_in_thread

_log = logging.getLogger("rlbus.client")

EVERYBODY = Target()
# Defaults of deadlines, in seconds: a load (workers fetch hundreds of MiB, engines compile nothing), an unload, a list.
LOAD_DEADLINE_S = 120.0
UNLOAD_DEADLINE_S = 30.0
LIST_DEADLINE_S = 10.0
# How long a refused load's caller waits for its files to leave the store, in seconds.
FREE_S = 5.0


class LoraVerbs:
    """The part of `rlbus.FleetClient` that is about adapters."""

    bus: Bus
    namespace: str
    caller: str
    _calls: Calls

    @one_call
    async def load_lora(
        self,
        name: str,
        folder: Path | str,
        target: Target = EVERYBODY,
        *,
        revision: int | None = None,
        shared: bool = False,
        checksum: str | None = None,
        hot_swap: bool = False,
        evict_idle: bool = False,
        where_possible: bool = False,
        pause_mode: PauseMode | str = PauseMode.KEEP,
        deadline_s: float = LOAD_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """Let requests name the PEFT adapter of `folder` on every worker, or on none; `report.lora` says as what.

        Args:
            folder: read here and put into the bus's store; with `shared`, the path under which every worker reads it,
                below one of its adapter roots.
            revision: None takes the name's next one. One that was given before stands for the same bytes for ever.
            deadline_s: for all of it, reading the folder and storing its files included.
            checksum: of the files, for a shared folder that can't be read here; else it is computed.
            hot_swap: replace the newest older revision in its place without a pause, if every engine can do that.
            evict_idle: where all places are taken, idle older revisions of the name make room.
            where_possible: only on workers whose engine takes adapters; the others have the outcome `skipped`. Without
                it the load is refused if one takes none.

        Raises: as `FleetClient.pause`; CapacityError: a worker has no room. AdapterError: the folder is no adapter.
            ConfigError: a name or number is wrong, or the server has no store.
        Cancel: before the controller was asked: nothing happened. After it: taken back as `FleetClient.pause` says.
        """
        check_name(name)
        if revision is not None and not 1 <= revision <= MAX_REVISION:
            raise ConfigError("revision", revision, f"use 1 to {MAX_REVISION}, or none for the next one")
        check_finite("deadline_s", deadline_s)  # before files are put into the store
        deadline = Deadline("lora_load", deadline_s)
        reading = self._source(Path(folder), shared, checksum)
        source, found = await deadline.bound(reading, "the adapter's files are not all read and stored")
        request = LoadLoraFleet(
            op_id=self._op_id(op_id),
            # One that joins has to say the same as the first.
            deadline_s=deadline.left_s() if op_id is None else deadline_s,
            caller=self.caller,
            name=name,
            source=source,
            checksum=found,
            revision=revision,
            target=target,
            pause_mode=_mode(pause_mode),
            hot_swap=hot_swap,
            evict_idle=evict_idle,
            where_possible=where_possible,
        )
        try:
            return await self._run(request, on_progress, check)
        except RefusedError as exc:
            # What may do next time is tried again, perhaps by others, with what they have put under the same key.
            may_do = exc.fault.retryable or isinstance(exc, BusyError)
            if isinstance(source, ObjectSource) and not may_do:
                await self._free(source.key)
            raise

    async def unload_lora(
        self,
        name: str,
        target: Target = EVERYBODY,
        *,
        revision: int | None = None,
        drain_s: float = DEFAULT_DRAIN_S,
        deadline_s: float = UNLOAD_DEADLINE_S,
        op_id: str | None = None,
        on_progress: ProgressHandler | None = None,
        check: bool = True,
    ) -> Report:
        """Let one revision go, or all of a name (None). Requests in flight keep it until they end, at most `drain_s`.

        The op doesn't wait for them: `report.lora.num_draining` workers still had some. Raises, Cancel: as
        `FleetClient.pause`; nothing is taken back.
        """
        check_name(name)
        if not 0 <= drain_s <= MAX_DRAIN_S:
            raise ConfigError("drain_s", drain_s, f"use 0 to {MAX_DRAIN_S:g} seconds")
        request = UnloadLoraFleet(
            op_id=self._op_id(op_id),
            deadline_s=deadline_s,
            caller=self.caller,
            name=name,
            revision=revision,
            drain_s=drain_s,
            target=target,
        )
        return await self._run(request, on_progress, check)

    async def loras(
        self, target: Target = EVERYBODY, *, deadline_s: float = LIST_DEADLINE_S, check: bool = True
    ) -> Report:
        """Ask each engine for its adapters and their requests in flight; each outcome's data is `LorasData`.

        What the fleet is meant to have is in `status().loras`. Raises, Cancel: as `FleetClient.pause`.
        """
        request = ListLoras(op_id=self.bus.new_id(), deadline_s=deadline_s, caller=self.caller, target=target)
        return await self._run(request, None, check)

    async def _source(self, folder: Path, shared: bool, checksum: str | None) -> tuple[LoraSource, str]:
        if shared:
            if not folder.is_absolute():
                raise ConfigError("folder", str(folder), "give the absolute path under which the workers see it")
            if checksum is None:
                checksum = (await run_in_thread(partial(adapter_sum, folder), name=THREAD)).checksum
            return FolderSource(path=str(folder)), checksum
        objects = open_objects(self.bus, self.namespace)
        try:
            put = await upload(objects, self.namespace, folder)
        finally:
            objects.close()
        if checksum is not None and checksum != put.checksum:
            await self._free(put.source.key)
            raise AdapterError(str(folder), f"its checksum is {put.checksum[:12]}, not {checksum[:12]}")
        return put.source, put.checksum

    async def _free(self, key: str) -> None:
        """Take what we have put for a load that no other try would make good out of the store, unless the fleet's
        adapters, or an op that runs, may come from it; then, and where nobody answers, it ends by itself.
        """
        objects = open_objects(self.bus, self.namespace)
        try:
            async with asyncio.timeout(FREE_S):
                fleet = await self.status(deadline_s=FREE_S)
                if fleet.op_id is None and all(getattr(one.source, "key", None) != key for one in fleet.loras):
                    await objects.delete(key)
        except (RLBusError, TimeoutError) as exc:
            _log.warning("object %s isn't deleted, and ends by itself: %s", key, exc)
        finally:
            objects.close()

    async def status(self, *, deadline_s: float) -> FleetView:
        """See `FleetClient.status`. Cancel: see there."""
        raise NotImplementedError

    def _op_id(self, op_id: str | None) -> str:
        raise NotImplementedError

    async def _run(self, request: Any, on_progress: ProgressHandler | None, check: bool) -> Report:
        raise NotImplementedError


def check_name(name: str) -> None:
    """Raises: ConfigError: it can't be an adapter's."""
    if not is_lora_name(name):
        raise ConfigError("name", name, "use 1 to 64 of A-Z a-z 0-9 _ . -, and give the revision apart from it")


def _mode(mode: PauseMode | str) -> PauseMode:
    try:
        return PauseMode(mode)
    except ValueError as exc:
        raise ConfigError("pause mode", mode, "use keep, wait or abort") from exc
