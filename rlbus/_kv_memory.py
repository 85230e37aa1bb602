"""A bucket in memory, behind the same Protocol as JetStream's, for tests under virtual time.

The bucket is the broker's: it outlives connections. Every call passes the faults of the connection that makes it, once
on the way there and once on the way back, so that a write may be lost, or done and not confirmed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rlbus._kv import CALL_LIMIT_S, Entry
from rlbus._memory import MemoryTransport
from rlbus.errors import BrokenError, ClosedError, ConflictError, DeadlineError, PayloadTooLargeError

T = TypeVar("T")


@dataclass(slots=True)
class _Kept:
    entry: Entry
    ends_s: float | None


@dataclass(slots=True)
class MemoryBucket:
    """What is kept, and the last revision that was given."""

    revision: int = 0
    kept: dict[str, _Kept] = field(default_factory=dict)


class MemoryKv:
    """One bucket of a MemoryBroker as seen over `transport`; implements `rlbus._kv.Kv`."""

    def __init__(self, transport: MemoryTransport, name: str = "state") -> None:
        self._transport = transport
        self._bucket = transport.broker.buckets.setdefault(name, MemoryBucket())
        self._subject = f"$KV.{name}"

    async def get(self, key: str) -> Entry | None:
        """See `Kv.get`."""
        return await self._call(key, lambda: self._look(key))

    async def create(self, key: str, value: bytes, *, ttl_s: int | None = None) -> int:
        """See `Kv.create`."""
        return await self._write(key, value, None, ttl_s)

    async def update(self, key: str, value: bytes, revision: int, *, ttl_s: int | None = None) -> int:
        """See `Kv.update`."""
        return await self._write(key, value, revision, ttl_s)

    async def delete(self, key: str, revision: int) -> None:
        """See `Kv.delete`."""

        def remove() -> None:
            self._check(key, revision)
            self._bucket.revision += 1
            del self._bucket.kept[key]

        await self._call(key, remove)

    async def keys(self, prefix: str) -> tuple[str, ...]:
        """See `Kv.keys`."""
        return await self._call(
            prefix, lambda: tuple(sorted(k for k in self._bucket.kept if k.startswith(f"{prefix}.") and self._look(k)))
        )

    async def _write(self, key: str, value: bytes, revision: int | None, ttl_s: int | None) -> int:
        limit_bytes = self._transport.max_payload_bytes
        if len(value) > limit_bytes:
            raise PayloadTooLargeError(f"value of {key}", len(value), limit_bytes)

        def put() -> int:
            self._check(key, revision)
            self._bucket.revision += 1
            ends_s = None if ttl_s is None else asyncio.get_running_loop().time() + ttl_s
            self._bucket.kept[key] = _Kept(Entry(value, self._bucket.revision), ends_s)
            return self._bucket.revision

        return await self._call(key, put)

    def _look(self, key: str) -> Entry | None:
        kept = self._bucket.kept.get(key)
        if kept is None or (kept.ends_s is not None and asyncio.get_running_loop().time() >= kept.ends_s):
            self._bucket.kept.pop(key, None)
            return None
        return kept.entry

    def _check(self, key: str, revision: int | None) -> None:
        there = self._look(key)
        if (None if there is None else there.revision) != revision:
            raise ConflictError(key, revision)

    async def _call(self, key: str, act: Callable[[], T]) -> T:
        """There and back, each way with the faults of this connection."""
        transport = self._transport
        if transport.is_closed:
            raise ClosedError("connection")
        if not transport.is_connected:
            raise BrokenError("connection", "not connected")
        subject, until_s = f"{self._subject}.{key}", asyncio.get_running_loop().time() + CALL_LIMIT_S
        if not await transport.travel(subject, until_s, outgoing=True):
            raise DeadlineError(f"the store's answer about {key}", CALL_LIMIT_S)
        error: ConflictError | None = None
        try:
            result = act()
        except ConflictError as exc:
            error = exc
        if not await transport.travel(subject, until_s, outgoing=False):
            raise DeadlineError(f"the store's answer about {key}", CALL_LIMIT_S)
        if error is not None:
            raise error
        return result
