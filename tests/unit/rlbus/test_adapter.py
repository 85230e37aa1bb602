"""The checksum of an adapter's files."""

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rlbus.adapter import MAX_CONFIG_BYTES, AdapterError, adapter_sum, copy_file

pytestmark = pytest.mark.unit


def write(folder: Path, config: str = "{}", weights: bytes = b"w") -> Path:
    """An adapter's files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_checksum_is_that_of_the_files_and_nothing_else(tmp_path: Path) -> None:
    """Where they lie and what lies beside them changes nothing; a byte of either file does."""
    first = adapter_sum(write(tmp_path / "a"))
    (write(tmp_path / "b") / "README.md").write_text("more")
    assert adapter_sum(tmp_path / "b") == first
    assert first.num_bytes == 3
    others = [
        write(tmp_path / "c", config="[]"),
        write(tmp_path / "d", weights=b"v"),
        write(tmp_path / "e", "{", b"}w"),
    ]
    assert len({first.checksum, *(adapter_sum(other).checksum for other in others)}) == 4


def test_checksum_is_the_one_that_other_programs_can_compute(tmp_path: Path) -> None:
    """A fixed value: trainers, workers and object stores of other versions have to agree."""
    assert adapter_sum(write(tmp_path)).checksum == "5418437900e2a0e57e80d87fbff221823fd142455f9e8e26f3c0792b18598dec"


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_folder_without_one_of_the_files_is_no_adapter(tmp_path: Path, missing: str) -> None:
    """It is named."""
    (write(tmp_path) / missing).unlink()
    with pytest.raises(AdapterError, match=missing):
        adapter_sum(tmp_path)


def test_configuration_without_end_is_not_read(tmp_path: Path) -> None:
    """It is small, or none."""
    with pytest.raises(AdapterError, match="has more than"):
        adapter_sum(write(tmp_path, config=" " * (MAX_CONFIG_BYTES + 1)))


def _look(folder: Path, found: list[Exception]) -> None:
    try:
        adapter_sum(folder)
    except AdapterError as exc:
        found.append(exc)


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    """A pipe that nobody writes into, or a device without end, would take the thread for ever."""
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        weights = write(tmp_path) / "adapter_model.safetensors"
        weights.unlink()
        make(weights)
        found: list[Exception] = []
        # Of its own, so that a test that fails ends, too.
        thread = threading.Thread(target=_look, args=(tmp_path, found), daemon=True)
        thread.start()
        thread.join(60.0)
        assert [str(exc) for exc in found] == [f"{weights}: is no regular file"]
        weights.unlink()


def test_copy_that_cannot_be_written_is_no_mistake_of_the_source(tmp_path: Path) -> None:
    """Who copies knows where to make room."""

    class Full(io.BytesIO):
        def write(self, data: Any, /) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    source = write(tmp_path / "a") / "adapter_config.json"
    with pytest.raises(OSError, match="No space left"):
        copy_file(source, Full(), None)
