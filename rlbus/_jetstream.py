"""Requests to JetStream over the connection that there is, for the stores that keep something in it.

nats-py's own JetStream client isn't used: its stores lose TTLs, read large objects in quadratic time, and leave
consumers on the server (facts/nats.md A4, A5, B17-B22). Everything here is one request with one answer, so it comes
back with the connection.
"""

import asyncio
from typing import Any

import msgspec

from rlbus._kv import NoStoreError
from rlbus._supervised import SupervisedTransport
from rlbus._transport import Message
from rlbus.errors import BrokenError, DeadlineError

# How long making a stream may take: a cluster elects a leader for it first (facts/nats.md A8: 3.2 s).
OPEN_LIMIT_S = 10.0
# Sources: nats-server's errors.json, JSStreamNotFoundErr, JSStreamNameExistErr, JSStreamWrongLastSequenceErrF,
# JSNoMessageFoundErr, JSNotEnabledErr, JSNotEnabledForAccountErr.
NO_STREAM, STREAM_EXISTS, WRONG_SEQUENCE, NO_MESSAGE = 10059, 10058, 10071, 10037
_OFF = (10076, 10039)
HOW_TO_ENABLE = (
    "JetStream isn't enabled there, and keeps the lease and the journal of controllers; start it with "
    "`nats-server -js` or `jetstream {}` in its configuration, or run one controller without them: "
    "`rlbus controller --single`"
)


class OffError(NoStoreError):
    """There is no JetStream (yet, if the server has just started)."""


class JetStream:
    """Calls of one store, each bounded by its own limit. `close` it when it isn't used any more."""

    def __init__(self, transport: SupervisedTransport) -> None:
        self.where = transport.where
        self._transport = transport
        self._inbox = transport.new_inbox()
        self._num_calls = 0
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._subscription = transport.subscribe(f"{self._inbox}.*", self._on_reply)

    @property
    def max_payload_bytes(self) -> int:
        """The largest message that can be stored."""
        return self._transport.max_payload_bytes

    def close(self) -> None:
        """Take no more answers. Idempotent; what is kept stays."""
        self._subscription.unsubscribe()

    async def ensure_stream(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration of the stream `config["name"]`, made as `config` says if it isn't there.

        Raises:
            OffError: JetStream is off. BrokenError, DeadlineError: the server doesn't make it, or doesn't answer.
        Cancel: it may be there.
        """
        name = str(config["name"])
        info = await self.api(f"STREAM.INFO.{name}", {}, OPEN_LIMIT_S, allowed=(NO_STREAM,))
        if "error" in info:
            info = await self.api(f"STREAM.CREATE.{name}", config, OPEN_LIMIT_S, allowed=(STREAM_EXISTS,))
        if "error" in info:  # somebody else made it meanwhile
            info = await self.api(f"STREAM.INFO.{name}", {}, OPEN_LIMIT_S)
        made: dict[str, Any] = info["config"]
        return made

    async def api(
        self, subject: str, question: dict[str, Any], limit_s: float, *, allowed: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        """One call of `$JS.API.<subject>`. Raises and Cancel: as `call`."""
        data = msgspec.json.encode(question) if question else b""
        return await self.call(f"$JS.API.{subject}", data, limit_s, allowed=allowed)

    async def call(
        self,
        subject: str,
        data: bytes,
        limit_s: float,
        *,
        headers: dict[str, str] | None = None,
        allowed: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """One request and its JSON answer. An error with a code in `allowed` is returned, others are raised.

        Raises:
            DeadlineError: no answer within `limit_s`. OffError: no JetStream there. NoStoreError: no such stream.
            BrokenError: it refuses, or we are disconnected. PayloadTooLargeError: nothing was sent.
        Cancel: it may have been done.
        """
        message = await self.ask(subject, data, limit_s, headers=headers)
        body: dict[str, Any] = msgspec.json.decode(message.data)
        error = body.get("error")
        if error is None or error.get("err_code") in allowed:
            return body
        if error.get("err_code") in _OFF:
            raise OffError(f"JetStream on {self.where}", "it isn't enabled")
        kind = NoStoreError if error.get("err_code") == NO_STREAM else BrokenError
        raise kind(f"JetStream on {self.where}", f"{error.get('description')} ({subject})")

    async def ask(self, subject: str, data: bytes, limit_s: float, *, headers: dict[str, str] | None = None) -> Message:
        """One request and its answer as it came. Raises and Cancel: as `call`."""
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
        return message

    def _unanswered(self, subject: str) -> BrokenError:
        """Nobody took it: no JetStream at all, or (on a stream's own subject) no leader of it at the moment."""
        if subject.startswith("$JS.API.") and not subject.startswith("$JS.API.DIRECT."):
            return OffError(f"JetStream on {self.where}", "nobody answers for it")
        return BrokenError(f"JetStream on {self.where}", "the stream isn't there, or has no leader now")

    def _on_reply(self, message: Message) -> None:
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)
