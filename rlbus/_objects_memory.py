"""Objects in memory, behind the same Protocol as JetStream's, for tests under virtual time.

They lie in a bucket of the broker, so they outlive connections, and pass the faults of the connection that uses them.
"""

from collections.abc import AsyncGenerator, AsyncIterable

import msgspec

from rlbus._kv_memory import MemoryKv
from rlbus._memory import MemoryTransport
from rlbus._objects import DEFAULT_TTL_S, MAX_OBJECT_BYTES, PART_BYTES, ObjectInfo, parts_of
from rlbus.errors import ConflictError, MissingError, PayloadTooLargeError


class MemoryObjects:
    """The objects of one namespace on a MemoryBroker, as seen over `transport`; implements `rlbus._objects.Objects`."""

    def __init__(self, transport: MemoryTransport, namespace: str) -> None:
        self._kv = MemoryKv(transport, f"objects_{namespace}")
        self._part_bytes = min(PART_BYTES, transport.max_payload_bytes)

    async def look(self, name: str) -> ObjectInfo | None:
        """See `Objects.look`."""
        there = await self._kv.get(f"{name}.info")
        return None if there is None else msgspec.json.decode(there.value, type=ObjectInfo)

    async def put(self, name: str, pieces: AsyncIterable[bytes], *, ttl_s: int = DEFAULT_TTL_S) -> ObjectInfo:
        """See `Objects.put`."""
        size_bytes = num_parts = 0
        async for part in parts_of(pieces, self._part_bytes):
            size_bytes += len(part)
            if size_bytes > MAX_OBJECT_BYTES:
                raise PayloadTooLargeError(f"object {name}", size_bytes, MAX_OBJECT_BYTES)
            await self._write(f"{name}.{num_parts}", part, ttl_s)
            num_parts += 1
        info = ObjectInfo(size_bytes, num_parts)
        await self._write(f"{name}.info", msgspec.json.encode(info), ttl_s)
        return info

    async def get(self, name: str) -> AsyncGenerator[bytes, None]:
        """See `Objects.get`. Cancel: leaves nothing."""
        info = await self.look(name)
        if info is None:
            raise MissingError(f"object {name}", "it isn't in the bus's store (any more)")
        for number in range(info.num_parts):
            part = await self._kv.get(f"{name}.{number}")
            if part is None:
                raise MissingError(f"object {name}", "a part of it is gone from the bus's store")
            yield part.value

    async def delete(self, name: str) -> None:
        """See `Objects.delete`."""
        for key in (f"{name}.info", *await self._kv.keys(name)):
            there = await self._kv.get(key)
            if there is not None:
                await self._kv.delete(key, there.revision)

    def close(self) -> None:
        """See `Objects.close`."""

    async def _write(self, key: str, data: bytes, ttl_s: int) -> None:
        """Whoever writes the same name writes the same bytes: over another's write, too."""
        while True:
            there = await self._kv.get(key)
            try:
                if there is None:
                    await self._kv.create(key, data, ttl_s=ttl_s)
                else:
                    await self._kv.update(key, data, there.revision, ttl_s=ttl_s)
            except ConflictError:
                continue
            return
