"""One Dynamo worker's HTTP surface, `POST <system_url>/engine/<route>`, in rlbus' words.

Dynamo answers 200 also when it failed: how a call ended is read from the HTTP status *and* from the answer's own
`status`. Its handlers go on when the caller hangs up, and those that change something wait for one lock of the worker,
in order; so what was asked for is done late rather than never. Source: NVIDIA Dynamo 1.6.1, `dynamo/vllm/handlers.py`.
"""

from dataclasses import dataclass
from typing import Any

from rlbus.errors import EngineDeadError, EngineError
from rlbus.schemas import Fault, FaultCode
from rlbus.workers.dynamo.listing import Listed, identity_of
from rlbus.workers.peer_http import PeerClient, PeerError

# Questions: milliseconds, unless the machine is busy.
ASK_S = 5.0
# Clocks of two machines differ a little between two looks, in seconds.
UPTIME_SLACK_S = 1.0
MAX_PROBLEM_CHARS = 500
_FINE = ("ok", "success")
# A body that every route refuses before it does anything; a route that isn't there answers 404.
_REFUSED_BODY = ["is this route there?"]
# What rlbus may use. Dynamo has more, and no list of them at `system_url`.
ROUTES = (
    "abort_request",
    "destroy_weights_update_group",
    "flush_cache",
    "get_weight_version",
    "init_weights_update_group",
    "liveness_probe",
    "load_lora",
    "pause_generation",
    "resume_generation",
    "set_weight_version",
    "unload_lora",
    "update_weights_from_disk",
    "update_weights_from_distributed",
)
_DISK = "update_weights_from_disk"
_LORAS = "/v1/loras"


@dataclass(frozen=True, slots=True)
class Began:
    """When a process began, in seconds of the loop: its uptime is a little older than the answer that tells it."""

    earliest_s: float
    latest_s: float

    def is_after(self, other: "Began") -> bool:
        """Whether it can't be the same process."""
        return self.earliest_s > other.latest_s + UPTIME_SLACK_S


class DynamoError(EngineError):
    """Dynamo did answer, and says that it failed."""


class Surface:
    """Asks one worker. The client stays its owner's. Every method raises `EngineDeadError` when the worker is gone,
    and `EngineError` otherwise.
    """

    def __init__(self, client: PeerClient) -> None:
        self._client = client
        # Why the worker is gone, as soon as a call has found that out.
        self.gone: str | None = None
        # Whether its weights are known to have a label.
        self._has_label = False

    async def call(self, route: str, body: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Call a route once; its answer. Cancel: Dynamo still does it."""
        answer = await self._post(route, body, limit_s)
        if not isinstance(answer, dict) or not isinstance(answer.get("status"), str):
            raise _failed(route, f"answered without a status: {str(answer)[:80]}")
        if answer["status"] not in _FINE:
            raise _failed(route, _words(answer))
        return answer

    async def _post(self, route: str, body: Any, limit_s: float) -> Any:
        try:
            return await self._client.post(f"/engine/{route}", body=body, limit_s=limit_s)
        except EngineDeadError as exc:
            self.gone = exc.fault.message
            raise

    async def has(self, route: str) -> bool:
        """Whether a route is there, without using it. Cancel: leaves nothing."""
        try:
            answer = await self._post(route, _REFUSED_BODY, ASK_S)
        except PeerError as exc:
            if exc.is_missing:
                return False
            raise
        return isinstance(answer, dict) and answer.get("status") == "error"

    async def is_paused(self) -> bool | None:
        """Dynamo's own flag; None if it can't be told.

        Dynamo has no question for it. But it checks that it is paused before it looks for the folder of a reload: asked
        for one without a folder it refuses either way, and the reason tells. Waits while Dynamo changes something.
        Cancel: leaves nothing.
        """
        try:
            await self.call(_DISK, {}, ASK_S)
        except DynamoError as exc:
            said = exc.fault.detail.get("problem", "")
            if "'model_path'" in said:
                return True
            if "must be paused" in said:
                return False
        return None

    async def label(self) -> str | None:
        """What its weights are labelled with; None if nobody has labelled them.

        Raises: EngineDeadError: they had a label, which only another process hasn't. Cancel: leaves nothing.
        """
        had_label = self._has_label  # an answer that is on its way speaks of the time before
        answer = await self.call("get_weight_version", {}, ASK_S)
        version = answer.get("version")
        is_declared = answer.get("version_declared")
        if version is not None and is_declared is not False:
            self._has_label = True
            return str(version)
        if had_label and is_declared is not True:  # else somebody has declared `null`
            self.gone = f"the Dynamo worker at {self._client.peer.url} was restarted: its weights have lost their label"
            raise EngineDeadError(Fault(code=FaultCode.ENGINE_DEAD, message=self.gone))
        return None

    async def set_label(self, label: str, limit_s: float) -> None:
        """Label the weights. Cancel: Dynamo still does it."""
        await self.call("set_weight_version", {"weight_version": label}, limit_s)
        self._has_label = True

    async def has_loras(self) -> bool:
        """Whether it lists its adapters, which it does with `DYN_LORA_ENABLED`; without it, it loads none.

        Cancel: leaves nothing.
        """
        try:
            await self.loras(ASK_S)
        except PeerError as exc:
            if exc.is_missing:
                return False
            raise
        return True

    async def loras(self, limit_s: float) -> frozenset[str]:
        """The names of its adapters. Cancel: leaves nothing."""
        try:
            answer = await self._client.get(_LORAS, limit_s=limit_s)
        except EngineDeadError as exc:
            self.gone = exc.fault.message
            raise
        names = answer.get("loras") if isinstance(answer, dict) and answer.get("status") in _FINE else None
        if not isinstance(names, dict):
            raise _failed(_LORAS, f"answered without a list of adapters: {str(answer)[:80]}")
        return frozenset(names)

    async def uptime_s(self, limit_s: float = ASK_S) -> float | None:
        """For how long the worker's process runs; None if it doesn't say. Cancel: leaves nothing."""
        try:
            answer = await self._client.get("/health", limit_s=limit_s)
        except EngineDeadError as exc:
            self.gone = exc.fault.message
            raise
        except PeerError as exc:
            if exc.status is None:
                raise
            return None  # 503: it says that it isn't ready; whether it does its work is asked elsewhere
        uptime = answer.get("uptime") if isinstance(answer, dict) else None
        try:
            return float(uptime["secs"]) + float(uptime["nanos"]) / 1e9  # type: ignore[index]
        except (TypeError, KeyError, ValueError):
            return None

    async def describe(self, default_component: str) -> Listed:
        """What discovery would say of the worker, from its own metrics and from which routes are there.

        Raises:
            EngineError: it isn't a Dynamo worker, or its name can't be told. EngineDeadError: nobody is there.
        Cancel: leaves nothing.
        """
        labels = identity_of(await self._client.text("GET", "/metrics", limit_s=ASK_S))
        try:
            instance_id = int(labels["worker_id"], 16)
        except (KeyError, ValueError) as exc:
            text = f"{self._client.peer.url} has no metrics of a Dynamo worker; is it its system port?"
            raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text)) from exc
        routes = frozenset([route for route in ROUTES if await self.has(route)])
        component = labels.get("dynamo_component") or default_component
        return Listed(component, str(instance_id), self._client.peer.url, labels.get("model", ""), routes)


def _words(answer: dict[str, Any]) -> str:
    said = answer.get("message") or answer.get("error") or "no reason given"
    return " ".join(str(said).split())[:MAX_PROBLEM_CHARS]


def _failed(route: str, problem: str) -> DynamoError:
    message = f"Dynamo's {route}: {problem}"
    return DynamoError(Fault(code=FaultCode.ENGINE_FAILED, message=message, detail={"problem": problem}))
