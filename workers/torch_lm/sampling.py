"""From logits to the next token."""

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


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Chosen:
    """The next token after one row of logits [vocab]."""
    logprobs = logits.float().log_softmax(-1)
    if sampling.temperature == 0:
        token = int(logits.argmax())
    else:
        probabilities = (logits.float() / sampling.temperature).softmax(-1)
        if sampling.top_p < 1:
            probabilities = _nucleus(probabilities, sampling.top_p)
        token = int(torch.multinomial(probabilities, 1, generator=generator))
    top: tuple[tuple[int, float], ...] = ()
    if sampling.num_top:
        best = logprobs.topk(sampling.num_top)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Chosen(token, float(logprobs[token]), top)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero but for the likeliest tokens whose sum reaches `top_p`; at least one stays."""
    ordered, indices = probabilities.sort(descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    return torch.zeros_like(probabilities).scatter_(0, indices, ordered)
