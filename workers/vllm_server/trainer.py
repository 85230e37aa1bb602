"""The trainer's end of rlbus' transfer backend, for loops that are written against vLLM's weight transfer.

```python
from rlbus.workers.vllm_server.trainer import GlooTrainerInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

info = GlooTrainerInitInfo(master_address="127.0.0.1", master_port=port, world_size=1 + client.world_size(), rank=0)
engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
engine.send_weights()
```
The same lines as for "nccl", on CPUs. `client` is anything with the four methods of vLLM's `VLLMWeightSyncClient`:
vLLM's own for one server or for a controller, or `rlbus.BusWeightSyncClient` for a fleet of any engines. Importing this
module registers the backend "gloo" with vLLM's factory; so does rlbus' plugin.

Unlike vLLM's NCCL engine it never hangs: every collective is bounded, and a step that fails on the other side breaks
the group at once, so that the step's error is what is raised.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any, ClassVar

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from rlbus.errors import ConfigError, RLBusError, TransferError
from rlbus.schemas import TensorSpec
from rlbus.transfer.bounded import GiveUp
from rlbus.transfer.flat import dtype_name
from rlbus.transfer.group import Group, open_group, prove
from rlbus.transfer.meeting import host_store
from rlbus.transfer.sender import send
from rlbus.workers.engines.native_group import BUCKET_BYTES, TIMEOUT_S, InitInfo, UpdateInfo, plan_of

BACKEND = "gloo"
# How long the engines may take to say why they failed, once our part of a step has: a group that breaks is noticed at
# once, and the answer of a fleet takes some milliseconds.
THEIR_WORD_S = 5.0
# vLLM refuses a name that is there.
_registered: list[str] = []


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """As vLLM's `NCCLTrainerInitInfo`. `world_size` is that of the group: this trainer's rank 0 and all engines' ranks.

    `master_port` 0 takes a free one. `timeout_s` bounds the joining, and each collective.
    """

    backend: ClassVar[str] = BACKEND

    master_address: str
    master_port: int
    world_size: int
    bucket_bytes: int = BUCKET_BYTES
    timeout_s: float = TIMEOUT_S


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Sends every tensor of its source over a Gloo group, as rank 0. Other ranks of the trainer only read the source.

    A step that failed has broken the group: `shutdown`, and `trainer_init` anew.
    """

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool = True) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._store: TCPStore | None = None
        self._group: Group | None = None
        self._bucket_bytes = BUCKET_BYTES

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> "GlooTrainerWeightTransferEngine":
        """Form the group with the engines. Blocks, for about `timeout_s` at most.

        Raises: ConfigError: no source, or a value that can't be. TransferError: it was not formed. What the client
            raises when the engines can't join.
        """
        if source is None:
            raise ConfigError("source", None, "give a WeightSource of vLLM: it has metadata() and can be iterated")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._join(init_info)
        return engine

    def send_weights(self) -> None:
        """One update: start, send everything, finish. Called on every rank of the trainer. Blocks.

        Raises: TransferError: the sending failed, or there is no group. What the client raises.
        """
        assert self.source is not None
        specs = tuple(_spec(meta) for meta in self.source.metadata())
        if not self.is_sender:
            for _ in self.source:  # its gathering is a collective of the trainer's
                pass
            return
        group = self._group
        if group is None:
            raise TransferError("send", "there is no group (any more); call trainer_init")
        stream_id = secrets.token_hex(8)
        info = UpdateInfo(
            names=tuple(spec.name for spec in specs),
            dtype_names=tuple(spec.dtype for spec in specs),
            shapes=tuple(spec.shape for spec in specs),
            stream_id=stream_id,
        )
        self.client.start_weight_update()

        def work() -> None:
            source = _Announced(self.source, specs)
            send(group, source, specs, self._bucket_bytes, lambda done, total: None, stream_id=stream_id)

        try:
            _beside(lambda: self.client.update_weights(_plain(info)), work, on_failure=group.abort)
        except BaseException:
            self._leave()
            raise
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group, and close the store. The engines stay in theirs until they are told. Idempotent."""
        self._leave()
        self._store = None

    def _join(self, init_info: GlooTrainerInitInfo) -> None:
        self._store = host_store(init_info.master_address, init_info.master_port)
        given = {
            "master_address": init_info.master_address,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": init_info.world_size,
            "group_id": secrets.token_hex(8),
            "bucket_bytes": init_info.bucket_bytes,
            "timeout_s": init_info.timeout_s,
        }
        try:
            info = msgspec.convert(given, InitInfo, strict=True)
        except msgspec.ValidationError as exc:
            raise ConfigError("init_info", "", str(exc)) from exc
        self._bucket_bytes = info.bucket_bytes
        give_up = GiveUp()

        def work() -> None:
            group = open_group(plan_of(info), 0, "cpu", give_up=give_up)
            try:
                prove(group)
            except BaseException:
                group.close()
                raise
            self._group = group

        try:
            _beside(lambda: self.client.init_weight_transfer_engine(_plain(info)), work, on_failure=give_up.set)
        except BaseException:
            self.shutdown()
            raise

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class _Announced:
    """vLLM's source as one of rlbus'."""

    def __init__(self, source: WeightSource, specs: tuple[TensorSpec, ...]) -> None:
        self._source = source
        self._specs = specs

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._source)


def register_trainer() -> None:
    """Add the backend to vLLM's trainer factory. Idempotent.

    Raises:
        ValueError: another plugin has taken the name.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if BACKEND not in _registered:
        WeightTransferTrainerFactory.register_engine(BACKEND, GlooTrainerWeightTransferEngine)
        _registered.append(BACKEND)


def _beside(theirs: Callable[[], None], ours: Callable[[], None], *, on_failure: Callable[[str], None]) -> None:
    """Have the engines told in a thread, and do our part here. When they fail, ours is ended by `on_failure`.

    Raises what they raise, else what ours raises. The thread is left behind if ours failed and they don't notice.
    """
    told: Future[None] = Future()

    def tell() -> None:
        try:
            theirs()
        except BaseException as exc:  # noqa: BLE001 - raised below
            told.set_exception(exc)
            on_failure(f"the engines failed: {exc}")
        else:
            told.set_result(None)

    Thread(target=tell, name="rlbus weight sync", daemon=True).start()
    try:
        ours()
    except RLBusError as exc:
        # The other side's error says more than a group that broke.
        with contextlib.suppress(TimeoutError):
            if (cause := told.exception(THEIR_WORD_S)) is not None:
                raise cause from exc
        raise
    told.result()


def _plain(info: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(info)
    return plain


def _spec(meta: ParamMeta) -> TensorSpec:
    return TensorSpec(name=meta.name, dtype=dtype_name(meta.dtype), shape=tuple(meta.shape))


register_trainer()
