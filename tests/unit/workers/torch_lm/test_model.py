"""Our model is transformers' Qwen3, by name and by value."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from rlbus.errors import ConfigError
from rlbus.workers.torch_lm.make import make_tiny_model
from rlbus.workers.torch_lm.model import CausalLM, ModelConfig, load_model

pytestmark = pytest.mark.unit


def decode(model: CausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy, over the KV cache."""
    pool = model.new_pool(1)
    slot = torch.tensor([pool.take()])
    tokens, start, out = torch.tensor([prompt]), 0, []
    for _ in range(num_tokens):
        positions = torch.arange(start, start + tokens.shape[1])[None]
        best = int(model.step(tokens, positions, slot, pool).argmax())
        out.append(best)
        start += tokens.shape[1]
        tokens = torch.tensor([[best]])
    return out


def edit(folder: Path, **changes: object) -> None:
    """Change a model's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("is_head_tied", [False, True])
def test_logits_names_and_greedy_tokens_equal_those_of_transformers(tmp_path: Path, is_head_tied: bool) -> None:
    """On random weights larger than the initial ones, with and without a tied head."""
    transformers = pytest.importorskip("transformers")
    folder = make_tiny_model(tmp_path / "m", is_head_tied=is_head_tied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path / "saved")
    ours = load_model(tmp_path / "saved")
    tokens = torch.randint(0, 512, (3, 50))
    with torch.no_grad():
        difference = (ours(tokens) - theirs(tokens).logits).abs().max()
    assert difference < 1e-4
    assert set(theirs.state_dict()) - set(ours.state_dict()) == ({"lm_head.weight"} if is_head_tied else set())
    prompt = tokens[0, :20].tolist()
    greedy = theirs.generate(
        tokens[:1, :20],
        attention_mask=torch.ones(1, 20, dtype=torch.int64),  # else it takes token 0 for padding
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert decode(ours, prompt, 30) == greedy[0, 20:].tolist()


def test_cached_steps_give_what_the_whole_text_gives(tmp_path: Path) -> None:
    """In parts, and with rows of unequal length in one batch."""
    model = load_model(make_tiny_model(tmp_path / "m"))
    torch.manual_seed(1)
    long, short = torch.randint(0, 512, (1, 150)), torch.randint(0, 512, (1, 9))
    pool = model.new_pool(2)
    slots = torch.tensor([pool.take(), pool.take()])
    model.step(long[:, :100], torch.arange(100)[None], slots[:1], pool)
    model.step(long[:, 100:149], torch.arange(100, 149)[None], slots[:1], pool)
    model.step(short[:, :8], torch.arange(8)[None], slots[1:], pool)
    last = torch.stack([long[0, -1:], short[0, -1:]])
    out = model.step(last, torch.tensor([[149], [8]]), slots, pool)
    with torch.no_grad():
        assert torch.allclose(out[0], model(long)[0, -1], atol=1e-5)
        assert torch.allclose(out[1], model(short)[0, -1], atol=1e-5)


def test_what_a_slot_held_before_does_not_reach_the_next_text(tmp_path: Path) -> None:
    """Not even the NaN of torn weights, which a mask would let through."""
    model = load_model(make_tiny_model(tmp_path / "m"))
    pool = model.new_pool(2)
    slot = pool.take()
    pool.write(slot, 0, torch.full_like(pool.read(slot, 0, 100), float("nan")))
    pool.give(slot)
    slots = torch.tensor([pool.take(), pool.take()])
    tokens = torch.tensor([[5], [6]])
    model.step(torch.ones(1, 60, dtype=torch.int64), torch.arange(60)[None], slots[1:], pool)
    out = model.step(tokens, torch.tensor([[0], [60]]), slots, pool)
    assert not out.isnan().any()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_parameters"),
    ],
)
def test_another_architecture_is_refused_by_name(tmp_path: Path, changes: dict[str, object], name: str) -> None:
    """Never approximated."""
    folder = make_tiny_model(tmp_path / "m")
    edit(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        load_model(folder)
    assert caught.value.name == name


def test_config_without_a_needed_number_or_without_a_file_is_refused(tmp_path: Path) -> None:
    """In one clear line."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.read(tmp_path)
    folder = make_tiny_model(tmp_path / "m")
    raw = json.loads((folder / "config.json").read_text())
    del raw["head_dim"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="has no head_dim"):
        ModelConfig.read(folder)


def test_eos_of_the_generation_config_wins_and_may_be_a_list(tmp_path: Path) -> None:
    """As with transformers and vLLM."""
    folder = make_tiny_model(tmp_path / "m")
    assert ModelConfig.read(folder).eos_token_ids == frozenset({1})
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ModelConfig.read(folder).eos_token_ids == frozenset({3, 4})
    (folder / "generation_config.json").unlink()
    assert ModelConfig.read(folder).eos_token_ids == frozenset({1})
