"""An orchestrator as prime-rl's: it knows the fleet by HTTP alone, and gives it new weights through a shared folder.

    prime_rl_like.py HTTP_URL MODEL_DIR OUTPUT_DIR COMPLETIONS_URL

`rlbus up --http-port 8001` in one terminal; export the RLBUS_URL that it prints in the others; `rlbus worker torch
MODEL_DIR --weight-root OUTPUT_DIR` in as many as you like; HTTP_URL is then http://127.0.0.1:8001, and COMPLETIONS_URL
the address that rollouts come from (here a worker's, in a real fleet a router's). RLBUS_HTTP_TOKEN is sent if set.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from rlbus.workers.torch_lm.model import load_model

NUM_STEPS = 2
READY_S = 60.0
# As prime-rl's, in seconds: what it waits for /pause and /resume, and for /update_weights.
ADMIN_S = 300.0
UPDATE_S = 720.0


class AdminPlane:
    """The four calls that prime-rl makes, once for the whole fleet instead of once for each server."""

    def __init__(self, url: str) -> None:
        token = os.environ.get("RLBUS_HTTP_TOKEN")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=ADMIN_S, trust_env=False)

    def wait_for_workers(self, model: str) -> list[dict[str, Any]]:
        """Every worker of the list, once nobody in it has an error and `model` is served."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            workers: list[dict[str, Any]] = self._get("/v1/rl/workers")["workers"]
            served = {entry["id"] for entry in self._get("/v1/models")["data"]}
            if workers and model in served and not any("error" in worker for worker in workers):
                return workers
            time.sleep(0.5)
        raise TimeoutError(f"the fleet isn't complete after {READY_S:g} s")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Engines stand still within, and keep their requests."""
        self._post("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            yield
        finally:
            self._post("/resume")

    def update_weights(self, folder: Path) -> str:
        """Load a folder on every worker; the version that the fleet has then."""
        answer = self._post("/update_weights", json={"weight_dir": folder.as_posix()}, timeout=UPDATE_S)
        return answer.headers["x-rlbus-version"]

    def last_step(self) -> int:
        """Of the fleet's version; 0 before the first. prime-rl itself knows it from its own checkpoint."""
        version = self._get("/weight_info")["weight_version"]
        return 0 if version == "default" else int(version.rpartition(".")[2])

    def _get(self, path: str) -> Any:
        return self._ask("GET", path).json()

    def _post(self, path: str, **options: Any) -> httpx.Response:
        return self._ask("POST", path, **options)

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """As prime-rl, ask again after 503, with which what passes by itself is told: nobody leads at the moment, say.

        What a call has begun, the next one joins.
        """
        deadline = time.monotonic() + READY_S
        while True:
            answer = self._client.request(method, path, **options)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() >= deadline:
                return answer.raise_for_status()
            time.sleep(0.5)


def rollout(url: str, seed: int) -> str:
    """One completion."""
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 1.0, "seed": seed}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False).raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def train_step(model: torch.nn.Module, seed: int) -> None:
    """Stands for the trainer, which is a program of its own in prime-rl."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)


def main(http_url: str, model_dir: str, output_dir: str, completions_url: str) -> None:
    """Rollouts, a step, the folder of that step, an update; again."""
    admin = AdminPlane(http_url)
    workers = admin.wait_for_workers(str(Path(model_dir).absolute()))
    print(f"{len(workers)} workers with {sum(w['world_size'] for w in workers)} ranks are ready")
    model = load_model(model_dir)
    first = admin.last_step() + 1
    for step in range(first, first + NUM_STEPS):
        texts = [rollout(completions_url, seed) for seed in range(2)]
        train_step(model, step)
        folder = Path(output_dir).absolute() / f"step_{step}"  # the workers have another current folder
        folder.mkdir(parents=True, exist_ok=True)  # there may be one of a fleet that is no more
        save_file({name: t.contiguous() for name, t in model.state_dict().items()}, folder / "model.safetensors")
        with admin.paused():
            version = admin.update_weights(folder)
        print(f"step {step}: {len(texts)} rollouts; the fleet is at {version}")


if __name__ == "__main__":
    main(*sys.argv[1:5])
