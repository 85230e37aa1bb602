"""A vLLM worker of two data-parallel ranks beside one of another size: every rank is a member, and none steps alone."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlbus.sync import Trainer
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import load_model
from tests.peers.fleet import ANSWER_S, Fleet, completion
from tests.peers.programs import Programs
from tests.tries import TooLateError, best_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

NUM_RANKS = 2
NUM_REQUESTS = 50
MAX_TOKENS = 1024
LIMITS = ("--max-model-len", str(MAX_TOKENS), "--kv-cache-memory-bytes", str(64 << 20))
OPTIONS = ("--dtype", "float32", "--enforce-eager", *LIMITS)
# How long half of a text may take, on a machine under load; 1 s on a quiet one.
HALF_S = 60.0
PROMPT = (7, 8, 9, 10)
# Of a text that is streamed: what fits.
NUM_TOKENS = MAX_TOKENS - len(PROMPT) - 1
# Two logits closer than this are a tie: two engines that sum floats in another order may pick either.
TIE = 1e-3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one architecture."""
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), seed=seed, max_positions=MAX_TOKENS) for seed in (4, 5)]


@pytest.fixture(scope="module")
def fleet(programs: Programs, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """The two workers, 7 (vLLM) and 8 (torch), at the first of the models."""
    fleet = Fleet(programs, tmp_path_factory.mktemp("fleet"))
    roots = ("--weight-root", str(models[0].parent), "--json")
    # Each rank of vLLM needs a process of its own.
    multi = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ranks = ("--data-parallel-size", str(NUM_RANKS))
    command = ("worker", "vllm", str(models[0]), "--small", "--instance-id", "7", *roots, *OPTIONS, *ranks)
    fleet.start("vllm", *command, **multi).document()
    fleet.start("torch", "worker", "torch", str(models[0]), "--instance-id", "8", *roots).document()
    assert fleet.until("7", lambda m: bool(m["admitted"]))["descriptor"]["world_size"] == NUM_RANKS
    fleet.until("8", lambda m: bool(m["admitted"]))
    return fleet


@pytest.fixture(scope="module")
def url(fleet: Fleet) -> str:
    """Where the vLLM server is."""
    return str(fleet.until("7", lambda m: True)["descriptor"]["completions_url"])


def of_rank(number: int) -> dict[str, str]:
    """The header by which a request reaches one rank."""
    return {"X-data-parallel-rank": str(number)}


def test_every_data_parallel_rank_is_updated_and_what_arrives_meanwhile_waits(
    fleet: Fleet, url: str, models: list[Path]
) -> None:
    """SCENARIOS 27: 50 requests reach a paused fleet. No rank steps, the updates go through, and after the resume all
    50 have the tokens of the new weights. Over a group of four members and from a folder.
    """
    name = str(models[0])

    def tokens() -> list[int]:
        """Of every rank."""
        found = [completion(url, name, headers=of_rank(n)) for n in range(NUM_RANKS)]
        assert found == [found[0]] * NUM_RANKS
        return found[0]

    first = tokens()
    fleet.rlbus("pause", "--mode", "keep")
    with ThreadPoolExecutor(NUM_REQUESTS) as pool, Trainer(fleet.url, backend="gloo") as trainer:
        waiting = [pool.submit(completion, url, name) for _ in range(NUM_REQUESTS)]
        trainer.wait_ready(world_size=NUM_RANKS + 1)
        for step in (1, 2):
            assert trainer.update_weights(load_model(models[1]), version=step, on_failure="stop").ok
        assert not any(request.done() for request in waiting)
        fleet.rlbus("resume")
        answers = [request.result() for request in waiting]
    second = tokens()
    assert second != first
    assert answers == [second] * NUM_REQUESTS
    fleet.rlbus("update", "--from", str(models[0]), "--version", "3")
    assert tokens() == first
    for worker in ("7", "8"):
        assert fleet.until(worker, lambda m: bool(m["admitted"]))["status"]["weights"]["version"] == [0, 3]


def stream(url: str, model: str, rank: int, on_token: Callable[[int], None]) -> list[int]:
    """Greedy tokens of one rank, as many as fit; `on_token` is called with how many there are, whenever some come."""
    body: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    tokens: list[int] = []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=of_rank(rank), timeout=ANSWER_S, trust_env=False
    ) as answer:
        answer.raise_for_status()
        for data in events(answer):
            tokens += data["choices"][0]["token_ids"] or ()
            on_token(len(tokens))
    assert len(tokens) == NUM_TOKENS
    return tokens


def events(answer: httpx.Response) -> Iterator[Any]:
    """What a stream of server-sent events brings."""
    for line in answer.iter_lines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            yield json.loads(data)


def is_by(folder: Path, tokens: list[int]) -> list[bool]:
    """Of each token, whether this model would have chosen it after what stands before it."""
    import torch

    text = [*PROMPT, *tokens]
    with torch.inference_mode():
        logits = load_model(folder)(torch.tensor([text]))[0, len(PROMPT) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return [bool(gap < TIE) for gap in logits.max(dim=1).values - chosen]


def streams_across(url: str, model: str, update: Callable[[], None]) -> list[list[int]]:
    """What both ranks stream, one text after the other, until `update` has returned. The ranks step together: the
    second begins when the first has half of its first text, so that they aren't both between two texts at once.
    """
    streams: list[list[int]] = []
    begun, is_over = [threading.Event() for _ in range(NUM_RANKS)], threading.Event()

    def generate(rank: int) -> None:
        def on_token(num_tokens: int) -> None:
            if num_tokens * NUM_RANKS >= NUM_TOKENS:
                begun[rank].set()

        assert rank == 0 or begun[rank - 1].wait(HALF_S)
        while not is_over.is_set():
            streams.append(stream(url, model, rank, on_token))

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        running = [pool.submit(generate, rank) for rank in range(NUM_RANKS)]
        try:
            assert all(event.wait(NUM_RANKS * HALF_S) for event in begun)
            update()
        finally:
            is_over.set()
        for thread in running:
            thread.result()
    return streams


def test_no_step_of_any_rank_runs_while_weights_are_written(fleet: Fleet, url: str, models: list[Path]) -> None:
    """SCENARIOS 26: both ranks stream while the weights are replaced. Up to one place each token is the old weights',
    from there on the new ones', and none is of a mixture, as a step that overlaps the first write would make it.
    """
    old, new = models
    versions = itertools.count(4)

    def play(trainer: Trainer) -> None:
        def update(folder: Path) -> None:
            assert trainer.update_weights(load_model(folder), version=next(versions), on_failure="stop").ok

        update(old)
        num_across = 0
        for tokens in streams_across(url, str(old), lambda: update(new)):
            num_old = [*is_by(old, tokens), False].index(False)
            assert all(is_by(new, tokens)[num_old:])
            num_across += 0 < num_old < len(tokens)
        if not num_across:
            raise TooLateError("the pause came when both ranks were between two texts")

    with Trainer(fleet.url, backend="gloo") as trainer:
        trainer.wait_ready(world_size=NUM_RANKS + 1)
        best_of(lambda: play(trainer))
