"""The bodies of `/v1/completions`: what a client may send, and what it gets, with vLLM's names.

A field that isn't known, or asks for what isn't there, is refused by name: a person's typing error never changes what
is sampled in silence.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rlbus.files import read_file
from rlbus.workers.torch_lm.generate import Finished
from rlbus.workers.torch_lm.sampling import Chosen, Sampling

# Completions of one call, over all its prompts.
MAX_CHOICES = 1024
# Source: vLLM's default of max_logprobs.
MAX_LOGPROBS = 20


class BadRequestError(Exception):
    """The body can't be served. `param` is the field."""

    def __init__(self, problem: str, param: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.param = param


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request. The fields after `user` are known, and taken with the values that change nothing."""

    prompt: str | list[int | str | list[int]]
    model: str | None = None
    n: int = 1
    max_tokens: int | None = 16
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    return_token_ids: bool | None = False
    request_id: str | None = None
    user: str | None = None
    stream: bool | None = False
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0


# What the torch engine doesn't do -> values that don't ask for it.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "stop": (None, "", []),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
}


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; those without text give none."""
        ...


class FileTokenizer:
    """A tokenizer.json, read by the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        # Its own `from_file` holds up all threads while the disk hangs.
        self._tokenizer = tokenizers.Tokenizer.from_str(read_file(path).decode())

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder; None if it has none, or `tokenizers` isn't installed."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return FileTokenizer(path)
    except ImportError:
        return None


def parse(data: bytes, tokenizer: Tokenizer | None) -> tuple[Body, Sampling, list[list[int]]]:
    """The body, how to sample, and every prompt as token ids.

    Raises:
        BadRequestError: naming the field.
    """
    try:
        body = msgspec.json.decode(data, type=Body)
    except msgspec.MsgspecError as exc:
        raise BadRequestError(str(exc)) from exc
    for name, neutral in _NEUTRAL.items():
        if getattr(body, name) not in neutral:
            raise BadRequestError(f"{name}={getattr(body, name)!r} is not supported by the torch engine", name)
    if body.best_of not in (None, body.n):
        raise BadRequestError(f"best_of={body.best_of} is not supported by the torch engine, only n", "best_of")
    prompts = _prompts(body.prompt, tokenizer)
    if not 1 <= body.n * len(prompts) <= MAX_CHOICES:
        raise BadRequestError(f"n * prompts is {body.n * len(prompts)}; use 1 to {MAX_CHOICES}", "n")
    return body, _sampling(body), prompts


def _sampling(body: Body) -> Sampling:
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    num_top = 0 if body.logprobs is None else body.logprobs
    if max_tokens < 1:
        raise BadRequestError(f"max_tokens={max_tokens}; use 1 or more", "max_tokens")
    if not 0 <= temperature <= 100:
        raise BadRequestError(f"temperature={temperature}; use 0 (greedy) to 100", "temperature")
    if not 0 < top_p <= 1:
        raise BadRequestError(f"top_p={top_p}; use more than 0, at most 1", "top_p")
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise BadRequestError(f"logprobs={num_top}; use 0 to {MAX_LOGPROBS}", "logprobs")
    if body.seed is not None and not -(2**63) <= body.seed < 2**63:
        raise BadRequestError("seed has more than 64 bits", "seed")
    return Sampling(max_tokens, temperature, top_p, body.seed, body.ignore_eos, num_top)


def _prompts(prompt: object, tokenizer: Tokenizer | None) -> list[list[int]]:
    parts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    return [_prompt(part, tokenizer) for part in parts]


def _prompt(part: object, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(part, str):
        if tokenizer is None:
            text = "this engine has no tokenizer (tokenizer.json and the tokenizers library); send token ids"
            raise BadRequestError(text, "prompt")
        return tokenizer.encode(part)
    if isinstance(part, list) and all(type(token) is int for token in part):
        return part
    raise BadRequestError("prompt is a text, a list of texts, token ids, or a list of lists of token ids", "prompt")


def choice(
    index: int, prompt: Sequence[int], finished: Finished, body: Body, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """One entry of `choices`.

    `weight_versions` has the spans of tokens that each version of the weights generated; `version` is null until the
    first update.
    """
    entry: dict[str, Any] = {
        "index": index,
        "text": "" if tokenizer is None else tokenizer.decode(finished.tokens),
        "finish_reason": finished.finish,
        "stop_reason": None,
        "logprobs": None if body.logprobs is None else _logprobs(finished.chosen, body.logprobs, tokenizer),
        "weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in finished.spans],
    }
    if body.return_token_ids:
        entry["token_ids"] = list(finished.tokens)
        entry["prompt_token_ids"] = list(prompt)
    return entry


def _logprobs(chosen: Sequence[Chosen], num_top: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    tokens = [_name(c.token, tokenizer) for c in chosen]
    offsets, offset = [], 0
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [{_name(t, tokenizer): value for t, value in (*c.top, (c.token, c.logprob))} for c in chosen]
    return {
        "text_offset": offsets,
        "token_logprobs": [c.logprob for c in chosen],
        "tokens": tokens,
        "top_logprobs": tops if num_top else None,
    }


def _name(token: int, tokenizer: Tokenizer | None) -> str:
    """The token's text, or what vLLM writes where texts can't tell tokens apart."""
    text = "" if tokenizer is None else tokenizer.decode([token])
    return text if text and "\ufffd" not in text else f"token_id:{token}"
