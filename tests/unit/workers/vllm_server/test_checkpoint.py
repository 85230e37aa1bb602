"""Safetensors folders, read from their headers, and what a model expects of an update."""

import json
import struct
from pathlib import Path

import pytest

from rlbus.errors import ManifestError
from rlbus.schemas import TensorSpec
from rlbus.workers.checkpoint import CheckpointError, accepts, read_folder
from rlbus.workers.folder_sums import folder_sums
from rlbus.workers.vllm_server.checkpoint import describe, expect

pytestmark = pytest.mark.unit

EMBED = TensorSpec(name="model.embed_tokens.weight", dtype="float32", shape=(4, 2))
NORM = TensorSpec(name="model.norm.weight", dtype="bfloat16", shape=(3,))
HEAD = TensorSpec(name="lm_head.weight", dtype="float32", shape=(4, 2))


def write(path: Path, *specs: TensorSpec, missing_bytes: int = 0) -> None:
    """A safetensors file of zeros."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        size = {"float32": 4, "bfloat16": 2}[spec.dtype]
        for dim in spec.shape:
            size *= dim
        code = {"float32": "F32", "bfloat16": "BF16"}[spec.dtype]
        header[spec.name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end - missing_bytes))


def test_folder_gives_the_tensors_of_all_its_files(tmp_path: Path) -> None:
    """Names, dtypes as torch spells them, shapes."""
    write(tmp_path / "a.safetensors", EMBED)
    write(tmp_path / "b.safetensors", NORM)
    assert read_folder(tmp_path) == (EMBED, NORM)


def test_index_says_which_files_count(tmp_path: Path) -> None:
    """A file that isn't in it is another checkpoint's."""
    write(tmp_path / "model-1.safetensors", EMBED)
    write(tmp_path / "old.safetensors", NORM)
    index = {"weight_map": {EMBED.name: "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_folder(tmp_path) == (EMBED,)


def test_file_that_the_index_names_has_to_be_there(tmp_path: Path) -> None:
    """The error names it."""
    index = {"weight_map": {EMBED.name: "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        read_folder(tmp_path)
    assert caught.value.path == str(tmp_path / "model-1.safetensors")


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    """vLLM would tear the model on it."""
    write(tmp_path / "a.safetensors", EMBED, missing_bytes=1)
    with pytest.raises(CheckpointError, match="truncated"):
        read_folder(tmp_path)


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 1),
        struct.pack("<Q", len(DEEP)) + DEEP,
    ],
)
def test_garbled_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """With a sentence, not with a traceback of json or struct."""
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError):
        read_folder(tmp_path)
    with pytest.raises(CheckpointError):
        folder_sums(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"weight_map": 1}', DEEP])
def test_garbled_index_is_refused(tmp_path: Path, content: bytes) -> None:
    """The same."""
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="is no index"):
        read_folder(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Also one that isn't there."""
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read_folder(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_folder(tmp_path / "nothing")


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Which of them counts can't be told."""
    write(tmp_path / "a.safetensors", EMBED)
    write(tmp_path / "b.safetensors", EMBED)
    with pytest.raises(CheckpointError, match="in another file too"):
        read_folder(tmp_path)


def test_floats_are_converted_and_nothing_else() -> None:
    """As vLLM copies them into its own parameters."""
    assert accepts("float32", "bfloat16")
    assert accepts("int32", "int32")
    assert not accepts("float32", "complex128")
    assert not accepts("float8_e4m3fn", "float32")


@pytest.mark.parametrize("announced", [(EMBED, NORM), (EMBED, NORM, HEAD)])
def test_tied_head_may_come_or_not(announced: tuple[TensorSpec, ...]) -> None:
    """Checkpoints of tied models leave it out, state dicts may have it."""
    expect((EMBED, NORM), is_head_tied=True, source="test").check(announced)
    expect((EMBED, NORM, HEAD), is_head_tied=True, source="test").check(announced)


def test_tied_head_of_another_shape_is_refused() -> None:
    """It is looked at when it comes."""
    bad = TensorSpec(name=HEAD.name, dtype="float32", shape=(5, 2))
    with pytest.raises(ManifestError) as caught:
        expect((EMBED, NORM), is_head_tied=True, source="test").check((EMBED, NORM, bad))
    assert caught.value.tensor == HEAD.name


def test_head_that_is_not_tied_is_needed() -> None:
    """Missing, it is named."""
    with pytest.raises(ManifestError) as caught:
        expect((EMBED, NORM, HEAD), is_head_tied=False, source="test").check((EMBED, NORM))
    assert caught.value.tensor == HEAD.name
    assert caught.value.fault.detail["reason"] == "missing"


def test_state_dict_is_described_in_a_manifest_s_words() -> None:
    """torch's prefix of a dtype is dropped."""
    assert describe([("model.norm.weight", "torch.bfloat16", [3])]) == (NORM,)
