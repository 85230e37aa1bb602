"""The learner of the demo: a policy model, its loss, and the greedy decoding that engines are compared with.

The reward is plain: the share of a completion's tokens that lie in a target set. The loss is REINFORCE with
group-relative advantages (the samples of one prompt are each other's baseline) and the usual ratio clip, on policy:
one optimiser step per batch of rollouts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

# 64 of the 512 tokens, printable ones left out on purpose; a random policy scores 0.125.
TARGET_FIRST, TARGET_LAST = 128, 191
# Two best logits closer than this are a near tie: float32 sums in another order may then pick the other token.
NEAR_TIE = 1e-4
CLIP = 0.2
MAX_GRAD_NORM = 1.0
# Keeps the advantage of a group whose samples all score the same at zero instead of 0/0.
STD_FLOOR = 1e-4


class LanguageModel(Protocol):
    """What the learner needs of a model; satisfied by thin wrappers around transformers and around our torch model."""

    @property
    def module(self) -> torch.nn.Module:
        """The module whose parameters are trained and sent."""
        ...

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Next-token logits, float32 [batch, length, vocab], for token ids int64 [batch, length]."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a prompt, as the engine returned it. `logprobs` has one value per token of `tokens`."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def reward(self) -> float:
        """Share of tokens in the target set, 0 to 1."""
        if not self.tokens:
            return 0.0
        return sum(TARGET_FIRST <= t <= TARGET_LAST for t in self.tokens) / len(self.tokens)


@dataclass(frozen=True, slots=True)
class Greedy:
    """A greedy decoding by the trainer: the tokens, their log probabilities, and per step the gap between the best two
    logits.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]


class TransformersModel:
    """A causal LM of the transformers library, in float32: an implementation that shares no code with the engines."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """See LanguageModel."""
        out: torch.Tensor = self.module(tokens, use_cache=False).logits
        return out.float()


class TorchModel:
    """Our own small torch model, for machines without transformers."""

    def __init__(self, folder: str) -> None:
        from rlbus.workers.torch_lm.model import load_model

        self._model = load_model(folder)
        self.module: torch.nn.Module = self._model

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """See LanguageModel."""
        out: torch.Tensor = self._model(tokens)
        return out.float()


def greedy(model: LanguageModel, prompt: Iterable[int], num_tokens: int) -> Greedy:
    """Decode `num_tokens` greedily, recomputing the whole prefix each step (no cache that could hide a fault)."""
    tokens = torch.tensor([list(prompt)], dtype=torch.int64)
    length = tokens.shape[1]
    logprobs, gaps = [], []
    with torch.no_grad():
        for _ in range(num_tokens):
            last = model.logits(tokens)[0, -1]
            best = last.topk(2)
            gaps.append(float(best.values[0] - best.values[1]))
            logprobs.append(float(last.log_softmax(-1)[best.indices[0]]))
            tokens = torch.cat([tokens, best.indices[:1].view(1, 1)], dim=1)
    return Greedy(tuple(tokens[0, length:].tolist()), tuple(logprobs), tuple(gaps))


class Learner:
    """Adam on the clipped policy-gradient loss; `step` consumes one batch of rollouts."""

    def __init__(self, model: LanguageModel, learning_rate: float) -> None:
        self.model = model
        self._optimiser = torch.optim.Adam(model.module.parameters(), lr=learning_rate)

    def step(self, groups: list[list[Sample]]) -> float:
        """One optimiser step on groups of samples; the samples of a group share their prompt, all have one length.

        Returns the loss. Log probabilities of the behaviour policy are the engine's own.
        """
        samples = [s for group in groups for s in group]
        prompt_len = len(samples[0].prompt)
        tokens = torch.tensor([s.prompt + s.tokens for s in samples], dtype=torch.int64)
        behaviour = torch.tensor([s.logprobs for s in samples])
        advantages = torch.cat([_advantages([s.reward for s in group]) for group in groups]).view(-1, 1)
        logits = self.model.logits(tokens)[:, prompt_len - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(2, tokens[:, prompt_len:, None])[..., 0]
        ratio = (logprobs - behaviour).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.module.parameters(), MAX_GRAD_NORM)
        self._optimiser.step()
        return float(loss.detach())


def _advantages(rewards: list[float]) -> torch.Tensor:
    scores = torch.tensor(rewards)
    return (scores - scores.mean()) / (scores.std() + STD_FLOOR)
