"""Our own address towards a bus of several servers, of which any may be gone. No name is looked up."""

import socket
import threading
from collections.abc import Iterator

import pytest

from rlbus import _addresses
from rlbus._addresses import best, is_elsewhere, own_address, own_address_towards
from rlbus.testing import hangs, run

pytestmark = pytest.mark.unit

GONE, HERE, FAR, OTHER, HUNG = (f"nats://{name}:4222" for name in ("gone", "127.0.0.1", "far", "other", "hung"))
OWN = {HERE: "127.0.0.1", FAR: "10.0.0.5", OTHER: "192.168.1.5"}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What each of them gives: `gone` has no address, and the look-up of `hung` doesn't return."""
    answer = threading.Event()

    def own(server: str) -> str:
        if server == HUNG:
            with hangs():
                answer.wait(30.0)
        if server not in OWN:
            raise socket.gaierror(-2, "Name or service not known")
        return OWN[server]

    monkeypatch.setattr(_addresses, "own_address", own)
    yield
    answer.set()


@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ((FAR, OTHER), "10.0.0.5"),
        ((GONE, FAR), "10.0.0.5"),
        ((FAR, GONE), "10.0.0.5"),
        ((HERE, OTHER), "192.168.1.5"),
        ((GONE, HERE), "127.0.0.1"),
    ],
)
def test_first_server_that_others_reach_gives_our_address(servers: tuple[str, ...], expected: str) -> None:
    """One that is gone costs nothing; loopback is for a bus that is nowhere else."""
    assert run(own_address_towards(servers, 5.0)) == expected


def test_look_up_that_hangs_costs_its_own_server_only() -> None:
    """For as long as connecting may take. Alone it is a time-out."""
    assert run(own_address_towards((HUNG, FAR), 0.05)) == "10.0.0.5"
    assert run(own_address_towards((FAR, HUNG), 0.05)) == "10.0.0.5"
    with pytest.raises(TimeoutError):
        run(own_address_towards((HUNG,), 0.05))


def test_no_server_with_an_address_is_the_first_ones_error() -> None:
    """As the system says it."""
    with pytest.raises(socket.gaierror, match="not known"):
        run(own_address_towards((GONE, GONE), 5.0))
    assert best(()) is None


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One family without a way there doesn't hide the other; none at all is an error of the system."""
    tried: list[str] = []

    class Probe:
        def __init__(self, *_: object) -> None: ...

        def connect(self, address: str) -> None:
            tried.append(address)
            if address == "v6":
                raise OSError(101, "Network is unreachable")

        def getsockname(self) -> tuple[str]:
            return ("10.0.0.5",)

        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(socket, "socket", Probe)
    ways = [(0, 0, 0, "", "v6"), (0, 0, 0, "", "v4")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ways)
    assert (own_address(FAR), tried) == ("10.0.0.5", ["v6", "v4"])
    del ways[1]
    with pytest.raises(OSError, match="unreachable"):
        own_address(FAR)


def test_bus_is_elsewhere_when_no_server_is_on_loopback() -> None:
    """A name other than localhost counts as elsewhere."""
    assert is_elsewhere((FAR, "nats://10.0.0.1"))
    assert not is_elsewhere((FAR, HERE))
    assert not is_elsewhere(("nats://localhost",))
    assert not is_elsewhere(("nats://[::1]:4222",))
