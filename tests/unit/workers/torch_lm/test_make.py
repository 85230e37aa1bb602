"""The tiny model that is made on the spot."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from rlbus.workers.torch_lm.make import make_tiny_model

pytestmark = pytest.mark.unit


def test_same_arguments_give_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    """So that two processes can make the same model."""
    one, same, other = (make_tiny_model(tmp_path / n, seed=s) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    for path in one.iterdir():
        assert path.read_bytes() == (same / path.name).read_bytes()
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_transformers_and_tokenizers_load_the_folder(tmp_path: Path) -> None:
    """Every text survives the tokenizer; ids beyond it have no text."""
    transformers = pytest.importorskip("transformers")
    folder = make_tiny_model(tmp_path / "m", vocab_size=300)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Grüße, 世界!").input_ids
    assert tokenizer.decode(ids) == "Grüße, 世界!"
    assert max(ids) < 259
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (type(model).__name__, model.config.vocab_size) == ("Qwen3ForCausalLM", 300)
    assert (
        (tokenizer.bos_token_id, tokenizer.eos_token_id)
        == (0, 1)
        == (model.config.bos_token_id, model.config.eos_token_id)
    )


def test_vocabulary_without_room_for_bytes_gets_no_tokenizer(tmp_path: Path) -> None:
    """Rather than one whose ids the model doesn't have."""
    folder = make_tiny_model(tmp_path / "m", vocab_size=100)
    assert not (folder / "tokenizer.json").exists()
    assert (folder / "model.safetensors").exists()
