"""Rollouts over the engines' own OpenAI routes. Nothing here knows which engine answers."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from rlbus.demo.policy import Sample
from rlbus.errors import BrokenError

# One completions request may take this long; a paused engine that nobody resumes ends the demo instead of hanging it.
REQUEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one worker serves completions: its name on the bus, base URL, and model name."""

    worker: str
    url: str
    model: str


class Rollouts:
    """Samples completions from endpoints in parallel, `num_parallel` at a time. Used as a context manager; not shared
    between threads.
    """

    def __init__(self, num_parallel: int) -> None:
        self._client = httpx.Client(timeout=REQUEST_S, trust_env=False)
        self._pool = ThreadPoolExecutor(max_workers=num_parallel, thread_name_prefix="rollout")

    def __enter__(self) -> "Rollouts":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def sample(
        self, endpoints: Sequence[Endpoint], prompts: Sequence[tuple[int, ...]], num_samples: int, num_tokens: int
    ) -> list[list[Sample]]:
        """`num_samples` completions of each prompt at temperature 1; prompts go to the endpoints in turn.

        Returns one group per prompt. Raises BrokenError when an endpoint doesn't answer as it should.
        """
        jobs = [
            self._pool.submit(self._complete, endpoints[i % len(endpoints)], prompt, num_samples, num_tokens, 1.0)
            for i, prompt in enumerate(prompts)
        ]
        return [job.result() for job in jobs]

    def greedy(self, endpoint: Endpoint, prompt: tuple[int, ...], num_tokens: int) -> Sample:
        """One greedy completion by one endpoint."""
        return self._complete(endpoint, prompt, 1, num_tokens, 0.0)[0]

    def _complete(
        self, endpoint: Endpoint, prompt: tuple[int, ...], num_samples: int, num_tokens: int, temperature: float
    ) -> list[Sample]:
        body = {
            "model": endpoint.model,
            "prompt": list(prompt),
            "n": num_samples,
            "max_tokens": num_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        try:
            answer = self._client.post(f"{endpoint.url}/v1/completions", json=body)
            answer.raise_for_status()
            choices = answer.json()["choices"]
        except httpx.HTTPStatusError as exc:
            raise BrokenError(endpoint.worker, f"completions answered {exc.response.text[:200]}") from exc
        except (httpx.HTTPError, KeyError, ValueError) as exc:
            raise BrokenError(endpoint.worker, f"completions at {endpoint.url} failed: {exc!r}") from exc
        return [_parse(endpoint, prompt, choice, num_tokens) for choice in choices]


def _parse(endpoint: Endpoint, prompt: tuple[int, ...], choice: dict[str, Any], num_tokens: int) -> Sample:
    tokens = tuple(choice["token_ids"])
    logprobs = tuple(choice["logprobs"]["token_logprobs"])
    if len(tokens) != num_tokens or len(logprobs) != num_tokens:
        raise BrokenError(endpoint.worker, f"asked for {num_tokens} tokens, got {len(tokens)} ({len(logprobs)} scored)")
    return Sample(prompt, tokens, logprobs)
