"""An orchestrator as NeMo-RL's over Dynamo: it finds the workers by HTTP, calls each at its own address, and gives them
new weights while they generate.

    nemo_rl_like.py HTTP_URL MODEL_DIR OUTPUT_DIR COMPLETIONS_URL

`rlbus up --http-port 8001` in one terminal; export the RLBUS_URL that it prints in the others; `rlbus worker torch
MODEL_DIR --weight-root OUTPUT_DIR` in as many as you like; HTTP_URL is then http://127.0.0.1:8001, and COMPLETIONS_URL
the address that rollouts come from (here a worker's, in a real fleet a router's). RLBUS_HTTP_TOKEN and
RLBUS_SYSTEM_TOKEN are sent if set.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from rlbus.workers.torch_lm.model import load_model

NUM_STEPS = 2
NUM_ROLLOUTS = 4
READY_S = 60.0
REFIT_S = 300.0


def headers(variable: str) -> dict[str, str]:
    """The bearer token in an environment variable, if there is one."""
    token = os.environ.get(variable)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


class DynamoFleet:
    """The workers of `/v1/rl/workers`, each called through `POST <system_url>/engine/<route>`."""

    def __init__(self, http_url: str) -> None:
        self._discovery = httpx.AsyncClient(
            base_url=http_url, headers=headers("RLBUS_HTTP_TOKEN"), timeout=READY_S, trust_env=False
        )
        self._admin = httpx.AsyncClient(headers=headers("RLBUS_SYSTEM_TOKEN"), timeout=REFIT_S, trust_env=False)
        self.workers: list[dict[str, Any]] = []

    async def discover(self) -> None:
        """Wait until there are workers, and none of them has an error."""
        async with asyncio.timeout(READY_S):
            while not self.workers or any("error" in w or "system_url" not in w for w in self.workers):
                await asyncio.sleep(0.5)
                answer = await self._discovery.get("/v1/rl/workers")
                self.workers = answer.json()["workers"] if answer.is_success else []

    async def on_all(self, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """One call to each; what they answer. An error comes with status 200, too."""
        calls = [self._admin.post(f"{w['system_url']}/engine/{route}", json=body) for w in self.workers]
        answers = [answer.raise_for_status().json() for answer in await asyncio.gather(*calls)]
        for worker, answer in zip(self.workers, answers, strict=True):
            if answer["status"] != "ok":
                raise RuntimeError(f"{route} on {worker['instance_id']}: {answer['message']}")
        return answers

    async def last_step(self) -> int:
        """The newest version that any worker has; 0 before the first."""
        versions = [answer["version"] for answer in await self.on_all("get_weight_version", {})]
        return max((int(str(v).rpartition(".")[2].lstrip("v")) for v in versions if v is not None), default=0)

    async def refit(self, folder: Path, step: int, *, in_flight: bool) -> None:
        """Load a folder on every worker; `in_flight`: requests go on, over the old cache as far as they had come."""
        body = {"weight_dir": str(folder), "weight_version": step, "engine_rpc": "update_weights_from_path"}
        if in_flight:
            flags = {"allow_unpaused": True, "reset_prefix_cache": False}
            await self.on_all("update_weights_from_distributed", body | flags)
            return
        await self.on_all("pause_generation", {"mode": "keep"})
        try:
            await self.on_all("update_weights_from_distributed", body)
        finally:
            await self.on_all("resume_generation", {})


async def rollouts(url: str) -> int:
    """Some completions at once; how many tokens came."""
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        body = {"prompt": [1, 2, 3], "max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
        calls = [client.post(f"{url}/v1/completions", json=body) for _ in range(NUM_ROLLOUTS)]
        answers = [answer.raise_for_status().json() for answer in await asyncio.gather(*calls)]
    return sum(answer["usage"]["completion_tokens"] for answer in answers)


def train_step(model: torch.nn.Module, seed: int, folder: Path) -> None:
    """Stands for yours, and writes what the workers load."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
    folder.mkdir(parents=True, exist_ok=True)  # there may be one of a fleet that is no more
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, folder / "model.safetensors")


async def main(http_url: str, model_dir: str, output_dir: Path, completions_url: str) -> None:
    """The first step with the fleet standing still, the next ones while rollouts are under way."""
    fleet = DynamoFleet(http_url)
    await fleet.discover()
    print(f"{len(fleet.workers)} workers with {sum(w['world_size'] for w in fleet.workers)} ranks are ready")
    model = load_model(model_dir)
    first = await fleet.last_step() + 1
    for step in range(first, first + NUM_STEPS):
        folder = output_dir / f"nemo_step_{step}"
        await asyncio.to_thread(train_step, model, step, folder)
        in_flight = step > first
        if in_flight:
            num_tokens, _ = await asyncio.gather(rollouts(completions_url), fleet.refit(folder, step, in_flight=True))
        else:
            await fleet.refit(folder, step, in_flight=False)
            num_tokens = await rollouts(completions_url)
        how = "while it generated" if in_flight else "paused"
        print(f"step {step}: refitted {how}; {num_tokens} tokens")


if __name__ == "__main__":
    discovery, model_folder, outputs, router = sys.argv[1:5]
    # The workers have another current folder.
    asyncio.run(main(discovery, model_folder, Path(outputs).absolute(), router))
