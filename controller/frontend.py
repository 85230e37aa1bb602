"""The frontend in front of the fleet, as far as adapters go: which models it shows at `GET <url>/v1/models`."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rlbus.controller.causes import fault
from rlbus.errors import BrokenError, ConfigError
from rlbus.schemas import Fault, FaultCode

# How long one answer may take, and how large it may be.
ANSWER_S = 5.0
MAX_ANSWER_BYTES = 4 << 20
# Between two looks, in seconds.
POLL_S = 0.5


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for this host alone."""

    def redirect_request(self, *_: object) -> None:
        return None


# No proxy of the environment: it is a part of the fleet.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


@dataclass(frozen=True, slots=True)
class Frontend:
    """Where it is, and how to get in.

    Raises: ConfigError: the URL is none.
    """

    # "http://host:port", without "/v1".
    url: str
    # Sent as a bearer token, if there is one.
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_good = parts.scheme in ("http", "https") and parts.hostname and parts.username is None
        except ValueError:
            is_good = False
        if not is_good:
            shown = self.url if "@" not in self.url else "***@" + self.url.rpartition("@")[2]
            raise ConfigError("frontend_url", shown, "use http://host:port, the key apart from it")

    async def models(self) -> frozenset[str]:
        """The models that it shows now.

        Raises: BrokenError: it doesn't answer within ANSWER_S, or with something else than a list of models.
        Cancel: a thread may go on for ANSWER_S.
        """
        return await asyncio.to_thread(self._read)

    async def until_shown(self, model: str, until_s: float, is_stopped: Callable[[], bool]) -> Fault | None:
        """Look until it shows `model`; why it doesn't after `until_s` (loop time). None also once `is_stopped`.

        Cancel: as `models`.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                shown = await self.models()
                last = f"it shows {', '.join(sorted(shown)) or 'nothing'}"
                if model in shown:
                    return None
            except BrokenError as exc:
                last = exc.problem
            if is_stopped():
                return None
            if loop.time() + POLL_S >= until_s:
                return fault(FaultCode.DEADLINE, f"the frontend {self.url} doesn't show {model}: {last}", model=model)
            await asyncio.sleep(POLL_S)

    def _read(self) -> frozenset[str]:
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url.rstrip('/')}/v1/models", headers=headers)
        try:
            with _OPENER.open(request, timeout=ANSWER_S) as answer:
                text = answer.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as exc:
            exc.close()
            raise BrokenError(self.url, f"it answers {exc.code} {exc.reason}") from exc
        except OSError as exc:
            raise BrokenError(self.url, f"it doesn't answer ({exc})") from exc
        try:
            if len(text) > MAX_ANSWER_BYTES:
                raise ValueError("too long")
            return frozenset(str(model["id"]) for model in json.loads(text)["data"])
        except (ValueError, KeyError, TypeError) as exc:
            raise BrokenError(self.url, "it answers with something else than a list of models") from exc
