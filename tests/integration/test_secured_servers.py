"""Servers that want credentials files or TLS: real ones, with keys and certificates made on the spot."""

import asyncio
import base64
import contextlib
import json
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from rlbus._nats import connect_nats
from rlbus._process import Child
from rlbus._supervised import SupervisedTransport
from rlbus.config import BusConfig
from rlbus.errors import BrokenError, ConfigError
from rlbus.server import EmbeddedServer, _announced_port

pytestmark = pytest.mark.integration

LIMIT_S = 90.0


@contextlib.asynccontextmanager
async def server(folder: Path, config: str) -> AsyncIterator[str]:
    """A server of this configuration; yields its host and port."""
    ports = folder / "ports"
    ports.mkdir()
    (folder / "nats.conf").write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: "{ports}"\n{config}\n')
    argv = (EmbeddedServer()._find_binary(), "-c", str(folder / "nats.conf"))
    child = await Child.start("nats-server", argv, log=folder / "log")
    try:
        async with asyncio.timeout(LIMIT_S):
            while (port := _announced_port(ports)) is None:
                assert child.returncode is None, (folder / "log").read_text()
                await asyncio.sleep(0.02)
        yield f"localhost:{port}"
    finally:
        await child.stop(5.0)


async def echoes(transport: SupervisedTransport) -> bool:
    """Whether what is sent arrives; closes the connection."""
    arrived = asyncio.Event()
    transport.subscribe("x", lambda message: arrived.set())
    transport.publish("x", b"1")
    async with asyncio.timeout(LIMIT_S):
        await arrived.wait()
    await transport.aclose()
    return arrived.is_set()


# -- credentials files ------------------------------------------------------------------------------------------------


class Key:
    """An nkey of one kind: O operator, A account, U user."""

    def __init__(self, prefix: int) -> None:
        self.seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), prefix)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public = self._pair.public_key.decode()

    def claim(self, subject: "Key", **nats: Any) -> str:
        """A JWT about `subject` that this key signs."""
        body = {
            "jti": secrets.token_hex(16),
            "iat": 1,
            "iss": self.public,
            "sub": subject.public,
            "nats": nats | {"version": 2},
        }
        text = ".".join(map(_encoded, ({"typ": "JWT", "alg": "ed25519-nkey"}, body)))
        return f"{text}.{_text(self._pair.sign(text.encode()))}"


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _encoded(part: dict[str, Any]) -> str:
    return _text(json.dumps(part).encode())


def creds_of(path: Path, jwt: str, user: Key) -> Path:
    """The file that NATS' own tools write."""
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    return path


def test_a_credentials_file_gets_in_and_another_key_does_not(tmp_path: Path) -> None:
    """What the server asks to be signed is signed with the file's seed."""
    operator, account = Key(nkeys.PREFIX_BYTE_OPERATOR), Key(nkeys.PREFIX_BYTE_ACCOUNT)
    user, other = Key(nkeys.PREFIX_BYTE_USER), Key(nkeys.PREFIX_BYTE_USER)
    limits = {"subs": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "data": -1, "payload": -1}
    account_jwt = operator.claim(account, type="account", limits=limits | {"wildcards": True})
    user_jwt = account.claim(user, type="user", subs=-1, data=-1, payload=-1)
    config = f"""
        operator: {operator.claim(operator, type="operator")}
        resolver: MEMORY
        resolver_preload: {{ {account.public}: {account_jwt} }}
    """

    async def main() -> None:
        async with server(tmp_path, config) as at:
            right = creds_of(tmp_path / "right.creds", user_jwt, user)
            ours = BusConfig(f"nats://{at}", connect_s=LIMIT_S, creds_file=str(right))
            assert await echoes(await connect_nats(ours, name="t"))
            wrong = creds_of(tmp_path / "wrong.creds", user_jwt, other)
            with pytest.raises(BrokenError, match="wrong credentials"):
                await connect_nats(BusConfig(f"nats://{at}", connect_s=LIMIT_S, creds_file=str(wrong)), name="t")

    asyncio.run(main())


def test_a_credentials_file_that_is_none_is_a_wrong_setting(tmp_path: Path) -> None:
    """Said at once, also where no server is."""

    async def connect(path: Path) -> None:
        await connect_nats(BusConfig("nats://127.0.0.1:1", creds_file=str(path)), name="t")

    with pytest.raises(ConfigError, match=r"creds_file=.*can't be read: No such file"):
        asyncio.run(connect(tmp_path / "none.creds"))
    with pytest.raises(ConfigError, match=r"can't be read: Is a directory"):
        asyncio.run(connect(tmp_path))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="no NATS credentials file"):
        asyncio.run(connect(tmp_path / "text"))


# -- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "c.pem", folder / "k.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*argv, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize("more", ["", "handshake_first: auto"])
@pytest.mark.parametrize("scheme", ["tls", "nats"])
def test_an_ordinary_server_with_tls_is_reached(
    tmp_path: Path, signed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, more: str, scheme: str
) -> None:
    """It says who it is first, and is encrypted then. SSL_CERT_FILE says who signed it."""
    certificate, key = signed
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    async def main() -> None:
        block = f'tls {{ cert_file: "{certificate}", key_file: "{key}", {more} }}\nauthorization {{ token: s3cret }}'
        async with server(tmp_path, block) as at:
            assert await echoes(await connect_nats(BusConfig(f"{scheme}://s3cret@{at}", connect_s=LIMIT_S), name="t"))
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_certificate_that_nobody_knows_is_refused(tmp_path: Path, signed: tuple[Path, Path]) -> None:
    """In one line that names it."""
    certificate, key = signed

    async def main() -> None:
        async with server(tmp_path, f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}') as at:
            with pytest.raises(BrokenError, match="CERTIFICATE_VERIFY_FAILED"):
                await connect_nats(BusConfig(f"tls://{at}", connect_s=LIMIT_S), name="t")

    asyncio.run(main())


def test_a_server_without_tls_is_told_no_credentials_behind_a_tls_url(tmp_path: Path) -> None:
    """Whoever asked for TLS gets it, or nothing: nats-py alone would send them in the clear."""
    said: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "x", "version": "2.11.0", "max_payload": 1_000_000, "auth_required": True}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        said.append(await reader.read(1000))
        writer.close()

    async def main() -> None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(BrokenError, match="doesn't ask for TLS"):
            await connect_nats(BusConfig(f"tls://s3cret@127.0.0.1:{port}", connect_s=LIMIT_S), name="t")
        listening.close()
        await listening.wait_closed()
        while not said:  # noqa: ASYNC110 - the other side is what is watched
            await asyncio.sleep(0.01)
        assert said == [b""]

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
