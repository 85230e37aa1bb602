"""Files that others name: only regular ones are opened, and nothing waits for others."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlbus.files import open_file, read_file

pytestmark = pytest.mark.unit


def _listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(path))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, _listen, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Any]
) -> None:
    """A pipe whose other end nobody has open would be waited for; a device never ends."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "x")
    num_open = len(os.listdir("/proc/self/fd"))
    for use in (open_file, read_file):
        with pytest.raises(OSError, match=r"is no regular file|No such device"):
            use(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    """Also by a link, and an empty one; reads wait for the disk, as those of any file."""
    (tmp_path / "x").write_bytes(b"some")
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "empty").touch()
    assert read_file(tmp_path / "link") == b"some"
    assert read_file(tmp_path / "empty") == b""
    with open_file(str(tmp_path / "x")) as file:
        assert os.get_blocking(file.fileno())
        assert file.read() == b"some"


def test_what_cannot_be_read_is_an_os_error(tmp_path: Path) -> None:
    """With its reason."""
    (tmp_path / "x").write_bytes(b"some")
    with pytest.raises(OSError, match="has more than 3 bytes"):
        read_file(tmp_path / "x", 3)
    with pytest.raises(OSError, match="No such file"):
        read_file(tmp_path / "none")
    with pytest.raises(OSError, match="is no path"):
        read_file("a\0b")


def test_a_file_on_which_somebody_holds_a_lease_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server on the same machine, say, which is asked for it."""
    (tmp_path / "x").write_bytes(b"some")
    really = os.open

    def leased(path: str, flags: int) -> int:
        if flags & os.O_NONBLOCK:
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        return really(path, flags)

    monkeypatch.setattr(os, "open", leased)
    assert read_file(tmp_path / "x") == b"some"
