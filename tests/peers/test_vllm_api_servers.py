"""A vLLM server with two API server processes on one port: whichever a client gets, the pause is the engine's."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.workers.torch_lm.make import make_tiny_model
from tests.peers.fleet import ANSWER_S, Fleet
from tests.peers.programs import START_S, Programs, free_port, vllm_argv, vllm_env

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

NUM_SERVERS = 2


@contextmanager
def one_each(url: str) -> Iterator[list[httpx.Client]]:
    """A client for every API server process, each with one connection that it keeps."""
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None)
    with ExitStack() as stack:
        found: dict[str, httpx.Client] = {}
        ends_s = time.monotonic() + START_S
        # The kernel deals connections out by their ports, and one process may come up later than the other.
        while len(found) < NUM_SERVERS:
            assert time.monotonic() < ends_s
            client = httpx.Client(base_url=url, limits=limits, timeout=ANSWER_S, trust_env=False)
            stack.callback(client.close)
            boot_id = client.get("/rlbus").json()["boot_id"]
            if boot_id in found:
                client.close()
            else:
                found[boot_id] = client
        yield list(found.values())


def tokens(client: httpx.Client, model: Path) -> list[int]:
    """Greedy, by the process that the client has."""
    body = {"model": str(model), "prompt": [7, 8, 9, 10], "max_tokens": 16, "temperature": 0}
    answer = client.post("/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True})
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["token_ids"])


def test_a_pause_holds_the_requests_of_every_api_server(programs: Programs, tiny_model: Path, tmp_path: Path) -> None:
    """SCENARIOS 50: paused over the bus, both processes say so, and what either gets then is answered after the resume,
    by the weights that came meanwhile. A pause by one process' own route is the other's, too, and the fleet sees it.
    """
    fleet, port = Fleet(programs, tmp_path), free_port()
    other = make_tiny_model(tmp_path / "other", seed=5)
    roots = f"{tmp_path}:{tiny_model.parent}"
    transfer = ("--weight-transfer-config", json.dumps({"backend": "gloo"}))
    python, _, _, *options = vllm_argv(tiny_model, port, *transfer)
    argv = [python, "-m", "tests.peers.api_servers", str(NUM_SERVERS), *options]
    # The engine's core needs a process of its own.
    names: Any = {"RLBUS_URL": fleet.url, "RLBUS_INSTANCE_ID": "7", "RLBUS_WEIGHT_ROOTS": roots}
    env = vllm_env(VLLM_ENABLE_V1_MULTIPROCESSING="1", CUDA_VISIBLE_DEVICES="", **names)
    programs.start("vllm", argv, env).until_answers(f"http://127.0.0.1:{port}/health")
    fleet.until("7", lambda member: bool(member["admitted"]))

    def said(clients: list[httpx.Client]) -> list[Any]:
        return [client.get("/is_paused").json()["is_paused"] for client in clients]

    with one_each(f"http://127.0.0.1:{port}") as clients, ThreadPoolExecutor(NUM_SERVERS) as pool:
        first = tokens(clients[0], tiny_model)
        assert tokens(clients[1], tiny_model) == first
        fleet.rlbus("pause", "--mode", "keep")
        assert said(clients) == [True, True]
        held = [pool.submit(tokens, client, tiny_model) for client in clients]
        fleet.rlbus("update", "--from", str(other), "--version", "1")
        assert not any(request.done() for request in held)
        fleet.rlbus("resume")
        second = [request.result() for request in held]
        assert second == [second[0]] * NUM_SERVERS
        assert second[0] != first
        for one, another in (clients, reversed(clients)):
            one.post("/pause", params={"mode": "keep"}).raise_for_status()
            assert said(clients) == [True, True]
            fleet.until("7", lambda member: member["status"]["generation"] == "paused")
            another.post("/resume").raise_for_status()
            assert said(clients) == [False, False]
            fleet.until("7", lambda member: bool(member["admitted"]))
