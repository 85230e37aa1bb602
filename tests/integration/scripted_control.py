"""A gRPC server of `vllm.Control` that answers as a test tells it; for what a real vllm-rs can't be made to do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from rlbus.workers.vllm_grpc import messages


@dataclass
class Refuse(Exception):
    """Answer with this status."""

    status: str
    details: str = ""


# Makes the answer of one call from its request; None is an empty message.
Answer = Callable[[Any], Awaitable[Any]]


@dataclass
class Script:
    """What the server is and does. `answers` goes before what it does by itself; `calls` has every call's name."""

    instance_id: str = "1"
    backend: str | None = "gloo"
    model: str = "/no/such/model"
    num_ranks: int = 1
    is_paused: bool = False
    label: str = "default"
    has_sleep: bool = False
    has_draft: bool = False
    max_loras: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    requests: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)

    def refuse(self, method: str, status: str, details: str = "") -> None:
        """Let every call of a method end with this status."""

        async def answer(request: Any) -> Any:
            raise Refuse(status, details)

        self.answers[method] = answer

    async def answer(self, method: messages.Method, request: Any) -> Any:
        """What the server says."""
        self.calls.append(method.name)
        self.requests[method.name] = request
        if (own := self.answers.get(method.name)) is not None:
            said = await own(request)
            return messages.message(method.response) if said is None else said
        found = messages.message(method.response)
        match method.name:
            case "GetServerInfo":
                found.instance_id, found.max_loras = self.instance_id, self.max_loras
                found.parallelism.world_size = self.num_ranks
                found.parallelism.data_parallel_size = found.parallelism.data_parallel_size_local = 1
                found.rl_capabilities.weight_transfer_enabled = self.backend is not None
                found.rl_capabilities.weight_transfer_backend = self.backend or ""
                found.rl_capabilities.sleep_mode_enabled = self.has_sleep
                found.rl_capabilities.draft_weight_updates_enabled = self.has_draft
            case "GetModelInfo":
                found.model_id, found.supports_lora = self.model, self.max_loras > 0
            case "IsPaused":
                found.paused = self.is_paused
            case "PauseGeneration":
                self.is_paused = True
            case "ResumeGeneration":
                self.is_paused = False
            case "GetWeightVersion":
                found.weight_version = self.label
            case "UpdateWeightVersion":
                self.label = request.weight_version
        return found


@asynccontextmanager
async def serve(script: Script, port: int = 0) -> AsyncIterator[int]:
    """The server on loopback; yields its port. Ends every call when left."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([_handlers(script)])
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=None)


def _handlers(script: Script) -> Any:
    def handler(method: messages.Method) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            script.metadata[method.name] = dict(context.invocation_metadata())
            try:
                return await script.answer(method, request)
            except Refuse as refusal:
                await context.abort(grpc.StatusCode[refusal.status], refusal.details)

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=lambda data: messages.parse(method.request, data),
            response_serializer=lambda found: found.SerializeToString(),
        )

    return grpc.method_handlers_generic_handler(
        messages.SERVICE, {method.name: handler(method) for method in messages.METHODS}
    )


async def forever(_request: Any) -> Any:
    """An answer that never comes."""
    await asyncio.get_running_loop().create_future()
