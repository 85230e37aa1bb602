"""The same loop with asyncio: rollouts run while the next update is prepared, and a worker that fails costs a retry.

DIR is a model folder; `python -c "from rlbus.workers.torch_lm.make import make_tiny_model as m; m('DIR')"` makes a
tiny one. `rlbus up` in one terminal; export the RLBUS_URL that it prints in the others; `rlbus worker torch DIR` in as
many as you like; then `python examples/async_loop.py DIR`.
"""

import asyncio
import sys

import httpx
import torch

import rlbus
from rlbus.workers.torch_lm.model import load_model

NUM_STEPS = 3


async def rollouts(fleet: rlbus.FleetView) -> list[str]:
    """One completion from each worker that may be sent some: alive, running, with the fleet's own weights."""
    urls = [m.descriptor.completions_url for m in fleet.members if m.admitted and m.descriptor.completions_url]
    async with httpx.AsyncClient(timeout=60.0) as client:
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 1.0}
        replies = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for url in urls))
    return [reply.raise_for_status().json()["choices"][0]["text"] for reply in replies]


def train_step(model: torch.nn.Module, step: int) -> None:
    """Stands for yours."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)


async def main(folder: str) -> None:
    """Sample, train, update; again."""
    model = load_model(folder)
    async with rlbus.connect() as bus:  # RLBUS_URL and RLBUS_NAMESPACE say where
        trainer = bus.trainer()
        fleet = await trainer.wait_ready(num_workers=1, deadline_s=120.0)
        first = (fleet.version.step if fleet.version else 0) + 1
        for step in range(first, first + NUM_STEPS):
            texts = await rollouts(await bus.fleet.status())
            await asyncio.to_thread(train_step, model, step)
            try:
                report = await trainer.update_weights(model, version=step, require=1)
            except rlbus.PartialError as error:
                print(f"step {step}: {error}; the next full update heals what is dirty")
                continue
            print(f"step {step}: {len(texts)} rollouts; {report}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
