"""A bucket in JetStream, laid out as NATS' own key-value store, with compare-and-set writes of our own.

nats-py's store isn't used: its `put` and `update` lose the TTL, its `create` fails over the marker of an expired key,
and its lists and watches leave consumers on the server (facts/nats.md A5, B17-B22). Everything here is one request with
one JSON answer over the connection that there is, so it comes back with it.
"""

import base64

from rlbus._jetstream import HOW_TO_ENABLE, NO_MESSAGE, WRONG_SEQUENCE, JetStream, OffError
from rlbus._kv import CALL_LIMIT_S, Entry
from rlbus._supervised import SupervisedTransport
from rlbus.errors import ConfigError, ConflictError

# How long the marker of a deleted key is kept by the server, in seconds; it then goes by itself.
MARKER_S = 60


class JetStreamKv:
    """One bucket; made by `open`. Implements `rlbus._kv.Kv`."""

    def __init__(self, transport: SupervisedTransport, bucket: str) -> None:
        self._jetstream = JetStream(transport)
        self._bucket = bucket
        self._stream = f"KV_{bucket}"

    @classmethod
    async def open(cls, transport: SupervisedTransport, bucket: str, first_revision: int) -> "JetStreamKv":
        """The bucket, made if it isn't there; then its revisions begin at `first_revision`.

        Raises:
            ConfigError: JetStream is off, or what has the bucket's name can't end keys by itself.
            BrokenError, DeadlineError: the server doesn't make it, or doesn't answer.
        Cancel: the bucket may be there.
        """
        kv = cls(transport, bucket)
        try:
            await kv._ensure(first_revision)
        except OffError as exc:
            kv.close()
            raise ConfigError("server", transport.where, HOW_TO_ENABLE) from exc
        except BaseException:
            kv.close()
            raise
        return kv

    def close(self) -> None:
        """Take no more answers. Idempotent; what is kept stays."""
        self._jetstream.close()

    async def get(self, key: str) -> Entry | None:
        """See `Kv.get`."""
        data, revision = await self._last(key)
        return None if data is None else Entry(data, revision)

    async def create(self, key: str, value: bytes, *, ttl_s: int | None = None) -> int:
        """See `Kv.create`."""
        data, revision = await self._last(key)
        if data is not None:
            raise ConflictError(key, None)
        return await self._put(key, value, revision, None, _ttl(ttl_s))

    async def update(self, key: str, value: bytes, revision: int, *, ttl_s: int | None = None) -> int:
        """See `Kv.update`."""
        return await self._put(key, value, revision, revision, _ttl(ttl_s))

    async def delete(self, key: str, revision: int) -> None:
        """See `Kv.delete`."""
        await self._put(key, b"", revision, revision, {"KV-Operation": "DEL", **_ttl(MARKER_S)})

    async def keys(self, prefix: str) -> tuple[str, ...]:
        """See `Kv.keys`."""
        question = {"subjects_filter": f"$KV.{self._bucket}.{prefix}.>"}
        info = await self._jetstream.api(f"STREAM.INFO.{self._stream}", question, CALL_LIMIT_S)
        subjects: dict[str, int] = info["state"].get("subjects") or {}
        return tuple(sorted(s.removeprefix(f"$KV.{self._bucket}.") for s in subjects))

    async def _ensure(self, first_revision: int) -> None:
        config = {
            "name": self._stream,
            "subjects": [f"$KV.{self._bucket}.>"],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "allow_msg_ttl": True,
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "num_replicas": 1,
            "first_seq": first_revision,
        }
        made = await self._jetstream.ensure_stream(config)
        if not made.get("allow_msg_ttl"):
            problem = "its messages can't end by themselves; nats-server 2.11 or newer, with allow_msg_ttl, is needed"
            raise ConfigError("JetStream stream", self._stream, problem)

    async def _last(self, key: str) -> tuple[bytes | None, int]:
        """The last write of a key and its revision; None for a marker, revision 0 for nothing at all."""
        question = {"last_by_subj": f"$KV.{self._bucket}.{key}"}
        subject = f"STREAM.MSG.GET.{self._stream}"
        answer = await self._jetstream.api(subject, question, CALL_LIMIT_S, allowed=(NO_MESSAGE,))
        if "error" in answer:
            return None, 0
        message = answer["message"]
        headers = base64.b64decode(message.get("hdrs") or "")
        # The server marks the end of a key with a header of its own where somebody asked it to.
        is_marker = b"KV-Operation:" in headers or b"Nats-Marker-Reason:" in headers
        return None if is_marker else base64.b64decode(message.get("data") or ""), int(message["seq"])

    async def _put(self, key: str, value: bytes, sequence: int, revision: int | None, headers: dict[str, str]) -> int:
        headers = {"Nats-Expected-Last-Subject-Sequence": str(sequence), **headers}
        subject = f"$KV.{self._bucket}.{key}"
        ack = await self._jetstream.call(subject, value, CALL_LIMIT_S, headers=headers, allowed=(WRONG_SEQUENCE,))
        if "error" in ack:
            raise ConflictError(key, revision)
        return int(ack["seq"])


def _ttl(ttl_s: int | None) -> dict[str, str]:
    return {} if ttl_s is None else {"Nats-TTL": f"{ttl_s}s"}
