"""A plain training loop that keeps a fleet of engines in step. No asyncio.

DIR is a model folder; `python -c "from rlbus.workers.torch_lm.make import make_tiny_model as m; m('DIR')"` makes a
tiny one. `rlbus up` in one terminal; export the RLBUS_URL that it prints in the others; `rlbus worker torch DIR` in as
many as you like; then `python examples/train_loop.py DIR`.
"""

import sys

import torch

import rlbus
from rlbus.workers.torch_lm.model import load_model

NUM_STEPS = 3


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Stands for yours: any loss will do to change the weights."""
    tokens = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(step))
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main(folder: str) -> None:
    """Train, and give every step's weights to the fleet."""
    model = load_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with rlbus.Trainer() as trainer:  # RLBUS_URL and RLBUS_NAMESPACE say where
        fleet = trainer.wait_ready(num_workers=1, deadline_s=120.0)
        print(f"{len(fleet.members)} workers are ready")
        first = (fleet.version.step if fleet.version else 0) + 1
        for step in range(first, first + NUM_STEPS):
            loss = train_step(model, optimizer, step)
            report = trainer.update_weights(model, version=step)
            print(f"step {step}: loss {loss:.3f}; {report}")


if __name__ == "__main__":
    main(sys.argv[1])
