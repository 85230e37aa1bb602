"""Which tensors a served model expects: from its checkpoint, or from its configuration when it has none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbus.errors import ManifestError
from rlbus.schemas import TensorSpec
from rlbus.workers.vllm_server.model import expected_tensors

pytest.importorskip("transformers", reason="comes with vLLM")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unit


def served(folder: Path, **changes: Any) -> Any:
    """What vLLM knows of a model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return SimpleNamespace(
        model=str(folder), revision=None, hf_config=config, hf_text_config=config, dtype=torch.float32
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model."""
    from rlbus.workers.torch_lm.make import make_tiny_model

    return make_tiny_model(tmp_path / "model", vocab_size=64, hidden=16, heads=2, kv_heads=1, head_dim=8)


def test_configuration_gives_the_same_list_as_the_checkpoint(folder: Path) -> None:
    """So dummy weights can be updated like loaded ones."""
    loaded = expected_tensors(served(folder))
    (folder / "model.safetensors").unlink()
    dummy = expected_tensors(served(folder))
    assert loaded is not None
    assert dummy is not None
    assert sorted(dummy.tensors, key=lambda spec: spec.name) == sorted(loaded.tensors, key=lambda spec: spec.name)
    assert (loaded.source, dummy.source) == (f"the checkpoint in {folder}", "the model's configuration")


def test_head_that_the_configuration_ties_is_optional(folder: Path) -> None:
    """It may come, since state dicts have it."""
    expected = expected_tensors(served(folder, tie_word_embeddings=True))
    assert expected is not None
    with_head = [spec for spec in expected.tensors if spec.name == "lm_head.weight"]
    assert len(with_head) == 1
    expected.check(expected.tensors)
    expected.check([spec for spec in expected.tensors if spec not in with_head])
    with pytest.raises(ManifestError):
        expected.check([*expected.tensors, TensorSpec(name="more", dtype="float32", shape=(1,))])


def test_model_that_nobody_knows_has_no_list(tmp_path: Path) -> None:
    """Neither files nor an architecture that transformers has."""
    unknown = SimpleNamespace(
        model=str(tmp_path), revision=None, hf_config=object(), hf_text_config=object(), dtype=torch.float32
    )
    assert expected_tensors(unknown) is None
