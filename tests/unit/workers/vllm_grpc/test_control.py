"""What a client of `vllm.Control` checks before it connects; its calls are tested against a server (integration)."""

import pytest

pytest.importorskip("grpc")

from rlbus.errors import ConfigError
from rlbus.workers.peer_http import Peer
from rlbus.workers.vllm_grpc.control import Control

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("headers", [{"X!Y": "sesame"}, {"X-A-Bin": "sesame"}, {"X-A": "sesame\x01"}, {"a~b": "x"}])
def test_header_that_grpc_can_not_send_is_refused_before_anything_is_called(headers: dict[str, str]) -> None:
    """HTTP would take it; without its value, which may be a secret."""
    peer = Peer.of("http://h:1", headers=headers)
    with pytest.raises(ConfigError, match="header") as caught:
        Control(peer)
    assert "sesame" not in str(caught.value)


def test_header_that_grpc_can_send_goes_with_every_call() -> None:
    """In lower case, as gRPC wants it."""
    control = Control(Peer.of("http://h:1", api_key="key", headers={"X_A.b-1": "Basic a=="}))
    assert dict(control._headers) == {"authorization": "Bearer key", "x_a.b-1": "Basic a=="}
