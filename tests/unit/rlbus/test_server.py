"""The embedded server where its folders can't be used; no process is started. The rest needs one: integration tests."""

import asyncio
import errno
import os
import tempfile
from pathlib import Path

import pytest

from rlbus.errors import BrokenError, ConfigError
from rlbus.server import MAX_STORE_BYTES, EmbeddedServer

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.unit


def test_a_store_that_cannot_be_used_is_a_wrong_setting(tmp_path: Path) -> None:
    """Below a file, say; in one line with the reason."""
    (tmp_path / "file").touch()

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"store_dir=.*cannot be used: Not a directory"):
            await EmbeddedServer(store_dir=tmp_path / "file" / "x").__aenter__()

    asyncio.run(main())


def test_a_disk_that_is_full_is_a_server_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is tried again, and the reason said: at the temporary folder, and at what is written into it."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        with pytest.raises(BrokenError, match="No space left on device"):
            await EmbeddedServer().__aenter__()

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", full)
        asyncio.run(main())
    monkeypatch.setattr(EmbeddedServer, "_write_config", full)
    asyncio.run(main())


def test_the_room_of_a_store_is_not_what_is_free_when_its_server_starts(tmp_path: Path) -> None:
    """Neither of `rlbus up` nor of docker-compose.yml: nats-server would take three quarters of that."""
    server = EmbeddedServer(store_dir=tmp_path / "store")
    try:
        _, _, path = server._make_folder()
        configs = (path.read_text(), (ROOT / "docker" / "nats.conf").read_text())
    finally:
        server._clean()
    for config in configs:
        assert f", max_file_store: {MAX_STORE_BYTES}" in config


@pytest.mark.parametrize("token", ["a\x00b", "a\x1bb", "a\nb", "", " ", "a\x7fb"])
def test_a_token_that_cannot_be_told_is_refused(token: str) -> None:
    """It isn't shown."""
    with pytest.raises(ConfigError) as caught:
        EmbeddedServer(token=token)
    assert str(caught.value).startswith("token='***'")
