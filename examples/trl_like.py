"""A trainer as TRL's GRPO: groups of rollouts from the fleet, a policy gradient step, and the new weights to the fleet.

DIR is a model folder; `python -c "from rlbus.workers.torch_lm.make import make_tiny_model as m; m('DIR')"` makes a
tiny one. `rlbus up` in one terminal; export the RLBUS_URL that it prints in the others; `rlbus worker torch DIR` in as
many as you like; then `python examples/trl_like.py DIR`.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import torch

import rlbus
from rlbus.workers.torch_lm.model import load_model

PROMPTS = ([5, 6, 7], [8, 9])
Reward = Callable[[list[int]], float]


@dataclass(frozen=True)
class Arguments:
    """What TRL's configuration calls these."""

    max_steps: int = 3
    num_generations: int = 4
    max_completion_length: int = 8
    learning_rate: float = 1e-3


@dataclass(frozen=True)
class Rollout:
    """One completion; its group's mean reward is the baseline."""

    prompt: list[int]
    tokens: list[int]


class FleetGenerator:
    """Where TRL has its vLLM client: generates on whoever is admitted, and gives everybody new weights."""

    def __init__(self, trainer: rlbus.Trainer) -> None:
        self._trainer = trainer
        fleet = trainer.wait_ready(num_workers=1, deadline_s=120.0)
        self.step = 0 if fleet.version is None else fleet.version.step
        self._urls = [m.descriptor.completions_url for m in fleet.members if m.descriptor.completions_url]
        self._client = httpx.Client(timeout=60.0, trust_env=False)

    def generate(self, arguments: Arguments) -> list[Rollout]:
        """A group for each prompt, the prompts spread over the workers."""
        found = []
        for prompt, url in zip(PROMPTS, itertools.cycle(self._urls), strict=False):
            body = {
                "prompt": prompt,
                "n": arguments.num_generations,
                "max_tokens": arguments.max_completion_length,
                "temperature": 1.0,
                "return_token_ids": True,
            }
            answer = self._client.post(f"{url}/v1/completions", json=body).raise_for_status().json()
            found += [Rollout(prompt, choice["token_ids"]) for choice in answer["choices"]]
        return found

    def sync_weights(self, model: torch.nn.Module) -> rlbus.UpdateReport:
        """What TRL does with `update_named_param`, one call per tensor and server: here one update of the fleet."""
        self.step += 1
        return self._trainer.update_weights(model, version=self.step)


class GRPOTrainer:
    """TRL's loop in short: generate, score, step, synchronise."""

    def __init__(self, model: torch.nn.Module, reward: Reward, arguments: Arguments, generator: FleetGenerator) -> None:
        self._model = model
        self._reward = reward
        self._arguments = arguments
        self._generator = generator
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)

    def train(self) -> None:
        """All steps; one line for each."""
        for step in range(1, self._arguments.max_steps + 1):
            rollouts = self._generator.generate(self._arguments)
            reward = self._policy_step(rollouts)
            report = self._generator.sync_weights(self._model)
            print(f"step {step}: {len(rollouts)} rollouts, reward {reward:.2f}; {report}")

    def _policy_step(self, rollouts: list[Rollout]) -> float:
        rewards = torch.tensor([self._reward(r.tokens) for r in rollouts])
        groups = rewards.view(-1, self._arguments.num_generations)
        advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
        loss = torch.zeros(())
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            loss = loss - advantage * self._log_probability(rollout)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(rewards.mean())

    def _log_probability(self, rollout: Rollout) -> torch.Tensor:
        tokens = torch.tensor([*rollout.prompt, *rollout.tokens])
        scores = self._model(tokens[None, :-1])[0].log_softmax(-1)
        of_completion = scores[len(rollout.prompt) - 1 :]
        return of_completion.gather(1, tokens[len(rollout.prompt) :, None]).mean()


def share_of_small_tokens(tokens: list[int]) -> float:
    """A reward that has something to learn: how many tokens are in the lower half of the vocabulary."""
    return sum(token < 256 for token in tokens) / max(1, len(tokens))


def main(folder: str) -> None:
    """Train."""
    with rlbus.Trainer() as trainer:  # RLBUS_URL and RLBUS_NAMESPACE say where
        generator = FleetGenerator(trainer)
        GRPOTrainer(load_model(folder), share_of_small_tokens, Arguments(), generator).train()


if __name__ == "__main__":
    main(sys.argv[1])
