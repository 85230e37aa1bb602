"""What every worker answers over HTTP, whatever its engine: is it there, how is it, what became of an op."""

import time

import msgspec
from starlette.responses import JSONResponse, Response

from rlbus.schemas import Generation, GetOutcome, OutcomeData, is_token
from rlbus.workers.agent import Agent
from rlbus.workers.system.app import OWN_SHAPE, Door
from rlbus.workers.system.calls import Call, CallError, Endpoint
from rlbus.workers.system.metrics import METRICS_TYPE, worker_metrics

# How long a question about an op may take, in seconds: it is answered from memory.
QUERY_S = 5.0


def base_endpoints(door: Door, prefix: str = "") -> list[Endpoint]:
    """`/health`, `/live`, `/metrics`, `/status`, `/ops/<op_id>`; with a prefix where another application has these."""
    base = _Base(door)
    return [
        Endpoint(f"{prefix}/health", "GET", base.health, OWN_SHAPE),
        Endpoint(f"{prefix}/live", "GET", base.live, OWN_SHAPE),
        Endpoint(f"{prefix}/metrics", "GET", base.metrics, OWN_SHAPE),
        Endpoint(f"{prefix}/status", "GET", base.status, OWN_SHAPE),
        Endpoint(f"{prefix}/ops/{{op_id}}", "GET", base.outcome, OWN_SHAPE),
    ]


class _Base:
    def __init__(self, door: Door) -> None:
        self._door = door
        self._began_s = time.monotonic()

    async def health(self, call: Call) -> Response:
        """200 while the engine answers, or is at work that may keep it from that; else 503. Paused is healthy."""
        await call.agent.observe()
        problem = health_problem(call.agent)
        body = {
            "status": "ready" if problem is None else "notready",
            "uptime_s": round(time.monotonic() - self._began_s, 3),
            "weights": call.agent.state.weights.state.value,
        }
        if problem is not None:
            body["problem"] = problem
        return JSONResponse(body, status_code=200 if problem is None else 503)

    async def live(self, call: Call) -> Response:
        """200 as long as the agent runs: its process needs no restart."""
        lost = call.agent.lost
        body = {"status": "live"} if lost is None else {"status": "lost", "problem": lost}
        return JSONResponse(body, status_code=200 if lost is None else 503)

    async def metrics(self, call: Call) -> Response:
        """Prometheus' text."""
        await call.agent.observe()
        return Response(worker_metrics(call.agent, self._door), media_type=METRICS_TYPE)

    async def status(self, call: Call) -> Response:
        """Descriptor and status, as on the bus."""
        await call.agent.observe()
        body = {"descriptor": call.agent.descriptor, "status": call.agent.status()}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def outcome(self, call: Call) -> Response:
        """What became of an op, for a caller that lost its answer."""
        op_id = str(call.request.path_params["op_id"])
        if not is_token(op_id):
            raise CallError(400, "Invalid op_id", "use 1 to 64 of A-Z a-z 0-9 _ -")
        call.limit_s = QUERY_S
        result = await call.do(GetOutcome(of_op_id=op_id))
        assert isinstance(result.data, OutcomeData)
        return Response(msgspec.json.encode(result.data), media_type="application/json")


def health_problem(agent: Agent) -> str | None:
    """Why a worker should get no work, and maybe a restart; None: nothing is wrong."""
    if agent.lost is not None:
        return agent.lost
    status = agent.status()
    if status.generation is Generation.UNKNOWN and status.work is None:
        return "the engine doesn't say how it is"
    return None
