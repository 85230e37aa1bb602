"""A bucket in JetStream, laid out as NATS' own key-value store, with compare-and-set writes of our own.

nats-py's store isn't used: its `put` and `update` lose the TTL, its `create` fails over the marker of an expired key,
and its lists and watches leave consumers on the server (facts/nats.md A5, B17-B22). Everything here is one request with
one JSON answer over the connection that there is, so it comes back with it.
"""

import asyncio
import base64
from typing import Any

import msgspec

from rlbus._kv import CALL_LIMIT_S, Entry
from rlbus._supervised import SupervisedTransport
from rlbus._transport import Message
from rlbus.errors import BrokenError, ConfigError, ConflictError, DeadlineError

# How long making the bucket may take: a cluster elects a leader for it first (facts/nats.md A8: 3.2 s).
OPEN_LIMIT_S = 10.0
# How long the marker of a deleted key is kept by the server, in seconds; it then goes by itself.
MARKER_S = 60
# Sources: nats-server's errors.json, JSStreamNotFoundErr, JSStreamNameExistErr, JSStreamWrongLastSequenceErrF,
# JSNoMessageFoundErr, JSNotEnabledErr, JSNotEnabledForAccountErr.
_NO_STREAM, _STREAM_EXISTS, _WRONG_SEQUENCE, _NO_MESSAGE = 10059, 10058, 10071, 10037
_OFF = (10076, 10039)
HOW_TO_ENABLE = (
    "JetStream isn't enabled there, and keeps the lease and the journal of controllers; start it with "
    "`nats-server -js` or `jetstream {}` in its configuration, or run one controller without them: "
    "`rlbus controller --single`"
)


class _OffError(BrokenError):
    """There is no JetStream (yet, if the server has just started)."""


class JetStreamKv:
    """One bucket; made by `open`. Implements `rlbus._kv.Kv`."""

    def __init__(self, transport: SupervisedTransport, bucket: str) -> None:
        self._transport = transport
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._inbox = transport.new_inbox()
        self._num_calls = 0
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._subscription = transport.subscribe(f"{self._inbox}.*", self._on_reply)

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
        except _OffError as exc:
            kv.close()
            raise ConfigError("server", transport.where, HOW_TO_ENABLE) from exc
        except BaseException:
            kv.close()
            raise
        return kv

    def close(self) -> None:
        """Take no more answers. Idempotent; what is kept stays."""
        self._subscription.unsubscribe()

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
        info = await self._api(f"STREAM.INFO.{self._stream}", question, CALL_LIMIT_S)
        subjects: dict[str, int] = info["state"].get("subjects") or {}
        return tuple(sorted(s.removeprefix(f"$KV.{self._bucket}.") for s in subjects))

    async def _ensure(self, first_revision: int) -> None:
        info = await self._api(f"STREAM.INFO.{self._stream}", {}, OPEN_LIMIT_S, allowed=(_NO_STREAM,))
        if "error" in info:
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
            subject = f"STREAM.CREATE.{self._stream}"
            info = await self._api(subject, config, OPEN_LIMIT_S, allowed=(_STREAM_EXISTS,))
        if "error" in info:  # another controller made it meanwhile
            info = await self._api(f"STREAM.INFO.{self._stream}", {}, OPEN_LIMIT_S)
        if not info["config"].get("allow_msg_ttl"):
            problem = "its messages can't end by themselves; nats-server 2.11 or newer, with allow_msg_ttl, is needed"
            raise ConfigError("JetStream stream", self._stream, problem)

    async def _last(self, key: str) -> tuple[bytes | None, int]:
        """The last write of a key and its revision; None for a marker, revision 0 for nothing at all."""
        question = {"last_by_subj": f"$KV.{self._bucket}.{key}"}
        subject = f"STREAM.MSG.GET.{self._stream}"
        answer = await self._api(subject, question, CALL_LIMIT_S, allowed=(_NO_MESSAGE,))
        if "error" in answer:
            return None, 0
        message = answer["message"]
        headers = base64.b64decode(message.get("hdrs") or "")
        # The server marks the end of a key with a header of its own where somebody asked it to.
        is_marker = b"KV-Operation:" in headers or b"Nats-Marker-Reason:" in headers
        return None if is_marker else base64.b64decode(message.get("data") or ""), int(message["seq"])

    async def _put(self, key: str, value: bytes, sequence: int, revision: int | None, headers: dict[str, str]) -> int:
        headers = {"Nats-Expected-Last-Subject-Sequence": str(sequence), **headers}
        ack = await self._call(f"$KV.{self._bucket}.{key}", value, CALL_LIMIT_S, headers, (_WRONG_SEQUENCE,))
        if "error" in ack:
            raise ConflictError(key, revision)
        return int(ack["seq"])

    async def _api(
        self, subject: str, question: dict[str, Any], limit_s: float, *, allowed: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        data = msgspec.json.encode(question) if question else b""
        return await self._call(f"$JS.API.{subject}", data, limit_s, None, allowed)

    async def _call(
        self, subject: str, data: bytes, limit_s: float, headers: dict[str, str] | None, allowed: tuple[int, ...]
    ) -> dict[str, Any]:
        """One request and its answer. An error of the server with a code in `allowed` is returned, others raised."""
        self._num_calls += 1
        reply = f"{self._inbox}.{self._num_calls}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = answer
        try:
            self._transport.publish(subject, data, reply, headers)
            async with asyncio.timeout(limit_s):
                message = await answer
        except TimeoutError as exc:
            raise DeadlineError(f"an answer of JetStream on {subject}", limit_s) from exc
        finally:
            self._waiting.pop(reply, None)
        if message.no_responders:
            raise self._unanswered(subject)
        body: dict[str, Any] = msgspec.json.decode(message.data)
        error = body.get("error")
        if error is None or error.get("err_code") in allowed:
            return body
        if error.get("err_code") in _OFF:
            raise _OffError(f"JetStream on {self._transport.where}", "it isn't enabled")
        raise BrokenError(f"JetStream on {self._transport.where}", f"{error.get('description')} ({subject})")

    def _unanswered(self, subject: str) -> BrokenError:
        """Nobody took it: no JetStream at all, or (on the bucket's own subject) no leader of it at the moment."""
        if subject.startswith("$JS.API."):
            return _OffError(f"JetStream on {self._transport.where}", "nobody answers for it")
        return BrokenError(f"JetStream on {self._transport.where}", "the bucket isn't there, or has no leader now")

    def _on_reply(self, message: Message) -> None:
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)


def _ttl(ttl_s: int | None) -> dict[str, str]:
    return {} if ttl_s is None else {"Nats-TTL": f"{ttl_s}s"}
