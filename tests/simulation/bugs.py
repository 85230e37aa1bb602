"""Bugs planted from outside."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    yield
