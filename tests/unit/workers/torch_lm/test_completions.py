"""What a completions body may say."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from rlbus.workers.torch_lm.completions import MAX_CHOICES, BadRequestError, choice, find_tokenizer, parse
from rlbus.workers.torch_lm.generate import Finished
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.sampling import Chosen, Sampling
from rlbus.workers.torch_lm.schedule import VersionSpan

pytestmark = pytest.mark.unit


class Letters:
    """Token 0 is "a", and so on; there are 26."""

    def encode(self, text: str) -> list[int]:
        """One token a letter."""
        return [ord(c) - ord("a") for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Nothing for others."""
        return "".join(chr(ord("a") + i) for i in ids if i < 26)


def body(**fields: Any) -> bytes:
    """With a prompt."""
    return json.dumps({"prompt": [1, 2], **fields}).encode()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", [[0, 1, 2]]),
        (["abc", "b"], [[0, 1, 2], [1]]),
        ([4, 5], [[4, 5]]),
        ([[4, 5], [6]], [[4, 5], [6]]),
        ([], [[]]),
    ],
)
def test_prompts_come_in_four_forms(prompt: object, expected: list[list[int]]) -> None:
    """Texts or token ids, one or several. An empty one is for the engine to refuse."""
    assert parse(body(prompt=prompt), Letters())[2] == expected


def test_defaults_are_openais_and_null_means_default() -> None:
    """16 tokens at temperature 1."""
    _, sampling, _ = parse(body(), None)
    assert sampling == Sampling()
    assert sampling.max_tokens == 16
    assert parse(body(max_tokens=None, temperature=None, top_p=None, seed=None, stop=None), None)[1] == Sampling()
    chosen = parse(body(max_tokens=3, temperature=0, top_p=0.5, seed=9, ignore_eos=True, logprobs=2), None)[1]
    assert chosen == Sampling(3, 0, 0.5, 9, True, 2)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream": True}, "stream"),
        ({"echo": True}, "echo"),
        ({"stop": ["x"]}, "stop"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"best_of": 4}, "best_of"),
        ({"max_token": 3}, "max_token"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"prompt": "text"}, "tokenizer"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "tokenizer"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    """A typing error too."""
    with pytest.raises(BadRequestError) as caught:
        parse(body(**fields), None)
    assert named in caught.value.problem


def test_body_that_is_no_json_is_refused() -> None:
    """Whatever it is."""
    for data in (b"", b"{", b"[]", b"\xff"):
        with pytest.raises(BadRequestError):
            parse(data, None)


def test_choice_has_vllms_fields_and_the_weights_versions() -> None:
    """Ids only when asked for; a token without text is named by its id."""
    chosen = (Chosen(0, -0.5, ((1, -0.1), (30, -0.2))), Chosen(30, -2.0, ((1, -0.1), (2, -0.2))))
    finished = Finished("r", chosen, "length", (VersionSpan(None, 0, 1), VersionSpan("0.1", 1, 2)))
    asked, _, _ = parse(body(logprobs=2, return_token_ids=True), None)
    entry = choice(3, [1, 2], finished, asked, Letters())
    assert entry == {
        "index": 3,
        "text": "a",
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [0, 30],
        "prompt_token_ids": [1, 2],
        "weight_versions": [{"version": None, "start": 0, "end": 1}, {"version": "0.1", "start": 1, "end": 2}],
        "logprobs": {
            "text_offset": [0, 1],
            "token_logprobs": [-0.5, -2.0],
            "tokens": ["a", "token_id:30"],
            "top_logprobs": [
                {"b": -0.1, "token_id:30": -0.2, "a": -0.5},
                {"b": -0.1, "c": -0.2, "token_id:30": -2.0},
            ],
        },
    }
    plain, _, _ = parse(body(), None)
    entry = choice(0, [1, 2], finished, plain, None)
    assert (entry["text"], entry["logprobs"]) == ("", None)
    assert "token_ids" not in entry


def test_tokenizer_of_a_folder_is_found_if_there_is_one(tmp_path: Path) -> None:
    """Special tokens have no text."""
    pytest.importorskip("tokenizers")
    tokenizer = find_tokenizer(make_tiny_model(tmp_path / "m"))
    assert tokenizer is not None
    ids = tokenizer.encode("héllo")
    assert tokenizer.decode([0, *ids, 1, 400]) == "héllo"
    assert find_tokenizer(tmp_path) is None
