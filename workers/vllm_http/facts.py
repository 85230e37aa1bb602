"""What a running vLLM server says of itself, asked once at the start: whether rlbus can drive it, and how it is built.

A server that lacks something says so by a route that isn't there; each such answer is turned into what to do about it.
"""

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rlbus.errors import ConfigError, EngineError
from rlbus.files import read_file
from rlbus.schemas import Fault, FaultCode
from rlbus.workers.checkpoint import CheckpointError
from rlbus.workers.peer_http import PeerClient, PeerError
from rlbus.workers.vllm_server.about import ABOUT, About
from rlbus.workers.vllm_server.model import checkpoint_folder

# Questions that the server answers by itself; the first /server_info takes 1.4 s (facts/vllm-cpu.md 8).
ASK_S = 30.0
DEV_MODE = "VLLM_SERVER_DEV_MODE=1"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What was found. `config` has the attributes of vLLM's VllmConfig; `about` is what rlbus's plugin says in it."""

    config: Any
    about: About | None


async def ask(client: PeerClient) -> ServerFacts:
    """Ask a healthy server everything, with its credentials first. Reads the model's config.json.

    Raises:
        ConfigError: the credentials are wrong, the server has no RL routes, or it is on the bus by itself.
        PeerError, EngineError, EngineDeadError. Cancel: leaves nothing.
    """
    url = client.peer.url
    try:
        # The route that vLLM guards with its API key; most of the others it doesn't (facts/vllm-cpu.md 8).
        await client.get("/v1/models", limit_s=ASK_S)
        info = await _rl_info(client)
        about = await _about(client)
    except PeerError as exc:
        if exc.is_denied:
            raise denied(exc) from exc
        raise
    if about is not None and about.worker is not None:
        problem = (
            f"that server is on the bus by itself, as {about.worker}; start it without RLBUS_URL, or use that worker"
        )
        raise ConfigError("url", url, problem)
    config = config_of(info)
    await _check_world_size(client, config)
    return ServerFacts(config, about)


def denied(error: PeerError) -> ConfigError:
    """What to tell whoever gave the credentials."""
    problem = f"the server refuses our credentials ({error.status}): check --api-key-env and --header"
    return ConfigError("url", error.fault.detail.get("url"), problem)


async def _rl_info(client: PeerClient) -> Any:
    """The server's configuration, which only a server with RL routes tells."""
    try:
        info = await client.get("/server_info", params={"config_format": "json"}, limit_s=ASK_S)
        await client.get("/is_paused", limit_s=ASK_S)
    except PeerError as exc:
        if not exc.is_missing:
            raise
        problem = f"that server has no RL routes (no {exc.fault.detail['call']}); start it with {DEV_MODE}"
        raise ConfigError("url", client.peer.url, problem) from exc
    return info


async def _about(client: PeerClient) -> About | None:
    """What rlbus's plugin in the server says; None without it."""
    try:
        return About.parse(await client.get(ABOUT, limit_s=ASK_S))
    except PeerError as exc:
        if exc.is_missing:
            return None
        raise


async def _check_world_size(client: PeerClient, config: Any) -> None:
    """The plan of a group counts on it, so two answers that differ are one too many."""
    parallel = config.parallel_config
    answer = await client.get("/get_world_size", params={"include_dp": "false"}, limit_s=ASK_S)
    if not isinstance(answer, dict) or answer.get("world_size") != parallel.world_size:
        text = f"{client.peer.url}: /get_world_size says {answer}, its configuration {parallel.world_size} ranks"
        raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text))


def config_of(info: Any) -> Any:
    """vLLM's configuration, as /server_info prints it, with attributes as vLLM's own objects have them. What it leaves
    out and rlbus looks at is added: of the model's own configuration, whether its head is tied.

    Raises:
        EngineError: it isn't printed as vLLM does.
    """
    try:
        config = _with_attributes(info["vllm_config"])
        parallel = config.parallel_config
        parallel.local_engines_only = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
        config.device_config.device_type = str(config.device_config.device).partition(":")[0]
        model = config.model_config
        is_tied = _is_head_tied(model.model, model.revision)
        model.hf_text_config = SimpleNamespace(tie_word_embeddings=is_tied)
        for needed in (parallel.world_size, parallel._api_process_count, config.weight_transfer_config):
            del needed
    except (AttributeError, KeyError, TypeError) as exc:
        text = f"/server_info doesn't tell the configuration as vLLM 0.32 does: {exc!r}"
        raise EngineError(Fault(code=FaultCode.ENGINE_FAILED, message=text)) from exc
    return config


def _with_attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{str(name): _with_attributes(inner) for name, inner in value.items()})
    return value


def _is_head_tied(model: str, revision: str | None) -> bool:
    """From the model's config.json; a model whose files aren't here can't be updated anyway."""
    try:
        found = json.loads(read_file(checkpoint_folder(model, revision) / "config.json"))
    except (CheckpointError, OSError, ValueError):
        return False
    text = found.get("text_config") or found
    return bool(text.get("tie_word_embeddings", found.get("tie_word_embeddings", False)))
