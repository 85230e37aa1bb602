"""Objects in JetStream: one stream per namespace, one message per part, and one that says that all of them are there.

Part n of an object lies on `rlbus.objects.<namespace>.<name>.<n>`, what is known of it on `....<name>.info`, which is
written last. A part is read by its subject, raw: no consumer, and a worker needs one permission to read
(`$JS.API.DIRECT.GET.<stream>.>`), none to make consumers (facts/nats.md A6). NATS' own object store isn't used: nats-py
reads it at 4 to 55 MB/s (facts/nats.md A4).
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any

import msgspec

from rlbus._jetstream import JetStream, OffError
from rlbus._objects import (
    DEFAULT_TTL_S,
    MAX_OBJECT_BYTES,
    MAX_PARTS_IN_FLIGHT,
    PART_BYTES,
    PART_LIMIT_S,
    ObjectInfo,
    parts_of,
)
from rlbus._supervised import SupervisedTransport
from rlbus.errors import ConfigError, MissingError, PayloadTooLargeError

HOW_TO_ENABLE = (
    "JetStream isn't enabled there, and keeps adapters for workers that can't read the folder; start the server with "
    "`nats-server -js` or `jetstream {}` in its configuration, or load from a folder that every worker can read"
)


class JetStreamObjects:
    """The objects of one namespace; implements `rlbus._objects.Objects`. `close` it when it isn't used any more.

    `is_writer`: makes the stream if it isn't there. A worker only reads.
    """

    def __init__(self, transport: SupervisedTransport, namespace: str, *, is_writer: bool = True) -> None:
        self._jetstream = JetStream(transport)
        self._stream = f"rlbus_objects_{namespace}"
        self._root = f"rlbus.objects.{namespace}"
        self._has_stream = not is_writer

    def close(self) -> None:
        """Take no more answers. Idempotent; what is kept stays."""
        self._jetstream.close()

    async def look(self, name: str) -> ObjectInfo | None:
        """See `Objects.look`."""
        await self._ensure()
        data = await self._read(f"{name}.info")
        return None if data is None else msgspec.json.decode(data, type=ObjectInfo)

    async def put(self, name: str, pieces: AsyncIterable[bytes], *, ttl_s: int = DEFAULT_TTL_S) -> ObjectInfo:
        """See `Objects.put`."""
        await self._ensure()
        headers = {"Nats-TTL": f"{ttl_s}s"}
        loop = asyncio.get_running_loop()
        size_bytes = num_parts = 0
        sending: deque[asyncio.Task[None]] = deque()
        try:
            async for part in parts_of(pieces, min(PART_BYTES, self._jetstream.max_payload_bytes)):
                size_bytes += len(part)
                if size_bytes > MAX_OBJECT_BYTES:
                    raise PayloadTooLargeError(f"object {name}", size_bytes, MAX_OBJECT_BYTES)
                if len(sending) >= MAX_PARTS_IN_FLIGHT:
                    await sending.popleft()
                sending.append(loop.create_task(self._write(f"{name}.{num_parts}", part, headers)))
                num_parts += 1
            while sending:
                await sending.popleft()
        finally:
            await _dropped(sending)
        info = ObjectInfo(size_bytes, num_parts)
        await self._write(f"{name}.info", msgspec.json.encode(info), headers)
        return info

    async def get(self, name: str) -> AsyncGenerator[bytes, None]:
        """See `Objects.get`. Cancel: leaves nothing."""
        info = await self.look(name)
        if info is None:
            raise MissingError(f"object {name}", "it isn't in the bus's store (any more)")
        reading: deque[asyncio.Task[bytes | None]] = deque()
        loop = asyncio.get_running_loop()
        try:
            number = 0
            while number < info.num_parts or reading:
                while number < info.num_parts and len(reading) < MAX_PARTS_IN_FLIGHT:
                    reading.append(loop.create_task(self._read(f"{name}.{number}")))
                    number += 1
                part = await reading.popleft()
                if part is None:
                    raise MissingError(f"object {name}", "a part of it is gone from the bus's store")
                yield part
        finally:
            await _dropped(reading)

    async def delete(self, name: str) -> None:
        """See `Objects.delete`. What says that it is there goes first."""
        await self._ensure()
        for which in ("info", ">"):
            question = {"filter": f"{self._root}.{name}.{which}"}
            await self._jetstream.api(f"STREAM.PURGE.{self._stream}", question, PART_LIMIT_S)

    async def _ensure(self) -> None:
        if self._has_stream:
            return
        config = {
            "name": self._stream,
            "subjects": [f"{self._root}.>"],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "allow_msg_ttl": True,
            "allow_direct": True,
            "deny_delete": True,
            "num_replicas": 1,
        }
        try:
            made = await self._jetstream.ensure_stream(config)
        except OffError as exc:
            raise ConfigError("server", self._jetstream.where, HOW_TO_ENABLE) from exc
        if not (made.get("allow_msg_ttl") and made.get("allow_direct")):
            problem = "its messages can't end by themselves; nats-server 2.11 or newer, with allow_msg_ttl, is needed"
            raise ConfigError("JetStream stream", self._stream, problem)
        self._has_stream = True

    async def _write(self, key: str, data: bytes, headers: dict[str, str]) -> None:
        await self._jetstream.call(f"{self._root}.{key}", data, PART_LIMIT_S, headers=headers)

    async def _read(self, key: str) -> bytes | None:
        """The raw message on a subject, None: there is none. No part is empty."""
        subject = f"$JS.API.DIRECT.GET.{self._stream}.{self._root}.{key}"
        message = await self._jetstream.ask(subject, b"", PART_LIMIT_S)
        return message.data or None


async def _dropped(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
