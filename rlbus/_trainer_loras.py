"""The part of `rlbus.AsyncTrainer` that is about adapters: a folder of the trainer, or what it has in memory."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlbus._calls import Calls, one_call
from rlbus._conversation import ProgressHandler, check_finite
from rlbus._deadline import Deadline
from rlbus.adapter_objects import THREAD
from rlbus.client import EVERYBODY, FleetClient
from rlbus.errors import ConfigError
from rlbus.lora_verbs import LOAD_DEADLINE_S, UNLOAD_DEADLINE_S
from rlbus.schemas import PauseMode, Report, Target
from rlbus.schemas.loras import DEFAULT_DRAIN_S
from rlbus.transfer.bounded import run_in_thread


class TrainerLoras:
    """Mixed into `Trainer`."""

    # The client of the controller.
    fleet: FleetClient
    _calls: Calls

    @one_call
    async def load_lora(
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
        """Let requests name this adapter on every worker, or on none; `report.lora.ids` says as what ("policy@7").

        Args:
            adapter: a PEFT folder, or the adapter's tensors in memory (what `get_peft_model_state_dict` gives), which
                are written to a temporary folder and put into the bus's store.
            config: with tensors: their LoraConfig, or its values.
            evict_idle: idle older revisions make room, so that one adapter a step never piles up.
            The rest as `FleetClient.load_lora`.

        Raises: as `FleetClient.load_lora`; ConfigError: also tensors without a configuration, or DTensors of several
            ranks, which have to be gathered before. OSError: the temporary
            folder can't be written.
        Cancel: as `FleetClient.load_lora`; the temporary folder is removed.
        """
        options: dict[str, Any] = {
            "revision": revision,
            "hot_swap": hot_swap,
            "evict_idle": evict_idle,
            "where_possible": where_possible,
            "pause_mode": pause_mode,
            "deadline_s": deadline_s,
            "on_progress": on_progress,
            "check": check,
        }
        if isinstance(adapter, Path | str):
            if config is not None:
                raise ConfigError("config", type(config).__name__, "a folder has its own adapter_config.json")
            return await self.fleet.load_lora(name, adapter, target, shared=shared, **options)
        if config is None or shared:
            raise ConfigError("config", config, "tensors need their LoraConfig, and can't be shared as a folder")
        from rlbus.transfer.adapter_folder import write_adapter

        check_finite("deadline_s", deadline_s)
        deadline = Deadline("lora_load", deadline_s)
        # A thread that is left behind may still write there.
        with tempfile.TemporaryDirectory(prefix="rlbus-adapter-", ignore_cleanup_errors=True) as folder:
            write = partial(write_adapter, Path(folder), adapter, config)
            await deadline.bound(run_in_thread(write, name=THREAD), "the adapter is still being written to a folder")
            options["deadline_s"] = deadline.left_s()
            return await self.fleet.load_lora(name, folder, target, **options)

    async def unload_lora(
        self,
        name: str,
        *,
        revision: int | None = None,
        drain_s: float = DEFAULT_DRAIN_S,
        target: Target = EVERYBODY,
        deadline_s: float = UNLOAD_DEADLINE_S,
        check: bool = True,
    ) -> Report:
        """Let one revision go, or all of a name; see `FleetClient.unload_lora`. Raises, Cancel: as there."""
        return await self.fleet.unload_lora(
            name, target, revision=revision, drain_s=drain_s, deadline_s=deadline_s, check=check
        )
