"""The trainer's side of an update that somebody else's trainer drives, for the contract suite: over Gloo, as rank 0."""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rlbus.schemas import Version
from rlbus.workers.engines.native_group import InitInfo, UpdateInfo, plan_of

BUCKET_BYTES = 1 << 14


class NativeSide:
    """`weights` maps a version to the whole model, in the order in which it is sent."""

    def __init__(self, weights: Callable[[Version], Mapping[str, Any]], num_ranks: int) -> None:
        self._weights = weights
        self._num_ranks = num_ranks
        self._store: Any = None
        self._info: InitInfo | None = None
        self._group: Any = None
        self._stream_id = ""

    def init_info(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """For the engine; the store is there from now on."""
        from rlbus.transfer.meeting import host_store

        self._store = host_store("127.0.0.1")
        self._info = InitInfo(
            master_address="127.0.0.1",
            master_port=self._store.port,
            rank_offset=1,
            world_size=1 + self._num_ranks,
            group_id=secrets.token_hex(4),
            bucket_bytes=BUCKET_BYTES,
            timeout_s=timeout_s,
        )
        plain: dict[str, Any] = msgspec.to_builtins(self._info)
        return plain

    async def join(self) -> None:
        """As rank 0, beside `init_native`."""
        from rlbus.transfer.group import open_group, prove

        info = self._info
        assert info is not None

        def work() -> None:
            self._group = open_group(plan_of(info), 0)
            prove(self._group)

        await asyncio.to_thread(work)

    def update_info(self, version: Version) -> dict[str, Any]:
        """What comes."""
        from rlbus.transfer.source import weight_source

        specs = weight_source(self._weights(version)).specs()
        self._stream_id = secrets.token_hex(4)
        plain: dict[str, Any] = msgspec.to_builtins(
            UpdateInfo(
                names=tuple(spec.name for spec in specs),
                dtype_names=tuple(spec.dtype for spec in specs),
                shapes=tuple(spec.shape for spec in specs),
                stream_id=self._stream_id,
            )
        )
        return plain

    async def send(self, version: Version, num_tensors: int | None = None) -> None:
        """All of it, or the first tensors, and then a death."""
        from rlbus.errors import TransferError
        from rlbus.transfer.sender import send
        from rlbus.transfer.source import weight_source

        weights = self._weights(version)
        specs = weight_source(weights).specs()

        class Source:
            def specs(self) -> Any:
                return specs

            def __iter__(self) -> Iterator[tuple[str, Any]]:
                for index, pair in enumerate(weights.items()):
                    if index == num_tensors:
                        raise RuntimeError("the trainer died")
                    yield pair

        def work() -> None:
            send(self._group, Source(), specs, BUCKET_BYTES, lambda done, total: None, stream_id=self._stream_id)

        try:
            await asyncio.to_thread(work)
        except TransferError:
            assert num_tensors is not None

    def leave(self) -> None:
        """Idempotent."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()
