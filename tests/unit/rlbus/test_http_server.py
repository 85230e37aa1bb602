"""What the HTTP servers of workers and controllers tell their applications."""

import socket
from typing import Any

import pytest

from rlbus._http_server import KEEPALIVE, _bind, config_of
from rlbus.errors import ConfigError
from rlbus.testing import run

pytestmark = pytest.mark.unit


def test_a_peer_is_who_it_is_whatever_its_headers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address goes into events, history and the owner of a pause: nobody on this machine may choose another's."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")

    async def main() -> None:
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((scope["client"], scope["scheme"]))

        config = config_of(app)
        config.load()
        headers = [(b"x-forwarded-for", b"10.9.9.9"), (b"x-forwarded-proto", b"https")]
        scope = {"type": "http", "client": ("127.0.0.1", 1234), "scheme": "http", "headers": headers}
        await config.loaded_app(scope, None, None)
        assert seen == [(("127.0.0.1", 1234), "http")]

    run(main())


def test_a_connection_whose_client_vanished_ends_by_itself() -> None:
    """A machine that is gone closes nothing: the system asks it, and whoever serves is told within 20 s."""
    listener = _bind("127.0.0.1", 0)
    try:
        with socket.create_connection(listener.getsockname()):
            listener.setblocking(True)
            served, _ = listener.accept()
        with served:
            assert served.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            found = {name: served.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in KEEPALIVE}
        assert found == KEEPALIVE
        assert found["TCP_KEEPIDLE"] + found["TCP_KEEPINTVL"] * found["TCP_KEEPCNT"] == 20
    finally:
        listener.close()


def test_an_address_that_is_not_ours_is_blamed_on_the_host() -> None:
    """Not on the port, which is free."""
    with pytest.raises(ConfigError, match="can't listen there") as caught:
        _bind("192.0.2.1", 0)
    assert (caught.value.name, caught.value.value) == ("host", "192.0.2.1")
    with pytest.raises(ConfigError) as caught:
        _bind("[::1", 0)
    assert caught.value.name == "host"
    taken = _bind("127.0.0.1", 0)
    with taken, pytest.raises(ConfigError, match=r"can't listen on 127\.0\.0\.1") as caught:
        _bind("127.0.0.1", taken.getsockname()[1])
    assert caught.value.name == "port"
