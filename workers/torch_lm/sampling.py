"""From logits to the next token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Temperature 0 is greedy; `top_p` keeps the likeliest tokens that make up that share.

    `seed` None draws one. `num_top` log probabilities of the likeliest tokens are wanted beside the chosen one's.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    ignores_eos: bool = False
    num_top: int = 0


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token. Log probabilities are the model's own, before temperature and top-p, as vLLM gives them."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def new_generator(sampling: Sampling) -> torch.Generator:
    """The source of randomness of one request."""
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def choose(logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]) -> list[Chosen]:
    """The next token after each row of logits [batch, vocab]; a row's randomness comes from its own generator only, so
    it doesn't depend on what else is in the batch.
    """
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    tokens = logits.argmax(-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [samplings[i] for i in drawn], [generators[i] for i in drawn])
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    return [
        Chosen(token, own[row], _top(logprobs[row], samplings[row].num_top))
        for row, token in enumerate(tokens.tolist())
    ]


def _draw(logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]) -> Tensor:
    """By the inverse of the distribution function, in float64."""
    temperatures = torch.tensor([[sampling.temperature] for sampling in samplings])
    probabilities = (logits / temperatures).softmax(-1)
    for row, sampling in enumerate(samplings):
        if sampling.top_p < 1:
            probabilities[row] = _nucleus(probabilities[row], sampling.top_p)
    summed = probabilities.double().cumsum(-1)
    uniform = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    places = torch.searchsorted(summed, uniform * summed[:, -1:], right=True)
    return places[:, 0].clamp(max=logits.shape[1] - 1)


def _top(logprobs: Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    if not num_top:
        return ()
    best = logprobs.topk(num_top)
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero but for the likeliest tokens whose sum reaches `top_p`; at least one stays."""
    ordered, indices = probabilities.sort(descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    return torch.zeros_like(probabilities).scatter_(0, indices, ordered)
