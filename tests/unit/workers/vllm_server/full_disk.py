"""A disk without room, in memory."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def full_disk(*, for_files: bool = True) -> Iterator[None]:
    """While inside, nothing new can be written, or only no folder; what is there can be read, and removed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "mkdir", _full)
        if for_files:
            patch.setattr(os, "pwrite", _full)
            patch.setattr(Path, "write_bytes", _full)
        yield
