"""Which server process has an agent, what it says of its address, and how it behaves without a bus."""

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from rlbus import connecting, subjects
from rlbus.bus import Bus
from rlbus.errors import BrokenError, ConfigError
from rlbus.schemas import (
    Announcement,
    Command,
    Generation,
    Goodbye,
    PauseGeneration,
    ResultStatus,
    WorkerMessage,
)
from rlbus.testing import LoopClock, MemoryBroker, run
from rlbus.workers.addresses import local_address_towards
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.vllm_server import engine as engine_module
from rlbus.workers.vllm_server.attachment import MAX_RETRY_S, Attachment, WorkerEnv
from tests.unit.workers.vllm_server.fake_llm import FakeLLM, config

pytestmark = pytest.mark.unit

URL = "nats://127.0.0.1:4222"
ENV = {"RLBUS_URL": URL, "RLBUS_NAMESPACE": "ns", "RLBUS_INSTANCE_ID": "7"}


def args(**given: Any) -> Any:
    """vLLM's options that are looked at."""
    return SimpleNamespace(
        **{"host": "127.0.0.1", "port": 8000, "uds": None, "ssl_keyfile": None, "api_key": None, **given}
    )


def server(index: int, count: int = 3) -> Any:
    """The AsyncLLM of one of several API servers."""
    return SimpleNamespace(vllm_config=config(num_servers=count, index=index))


def app(port: int | None = None, *, is_up: bool = True) -> Any:
    """The application, with its uvicorn server once there is one."""
    sock = SimpleNamespace(getsockname=lambda: ("127.0.0.1", port))
    listening = [] if port is None else [SimpleNamespace(sockets=[sock])]
    return SimpleNamespace(
        router=SimpleNamespace(routes=[]),
        state=SimpleNamespace(server=SimpleNamespace(started=is_up, servers=listening)),
    )


def test_only_the_first_of_several_api_servers_has_an_agent() -> None:
    """SCENARIOS 50: they share one engine, and would be as many workers."""
    found = [Attachment.from_env(server(index), args(), ENV) is not None for index in range(3)]
    assert found == [True, False, False]


def test_without_a_url_the_server_stays_off_the_bus() -> None:
    """The plugin alone changes nothing."""
    assert Attachment.from_env(server(0), args(), {"RLBUS_INSTANCE_ID": "not even a number"}) is None
    assert WorkerEnv.parse({}) is None


@pytest.mark.parametrize(
    "name", ["RLBUS_INSTANCE_ID", "RLBUS_COMPONENT", "RLBUS_NAMESPACE", "RLBUS_WEIGHT_ROOTS", "RLBUS_ADVERTISE_HOST"]
)
def test_wrong_setting_is_refused_when_the_server_starts(name: str) -> None:
    """Better than a server that isn't where somebody expects it."""
    with pytest.raises(ConfigError):
        Attachment.from_env(server(0), args(), {**ENV, name: "a b.c"})


@pytest.mark.parametrize(
    ("given", "extra", "expected"),
    [
        ({}, {}, "http://127.0.0.1:8000"),
        ({"port": 0}, {}, "http://127.0.0.1:4711"),
        ({"host": "0.0.0.0"}, {}, "http://127.0.0.1:8000"),  # the way to the bus, which is on loopback here
        ({"host": None}, {"RLBUS_ADVERTISE_HOST": "gpu-3"}, "http://gpu-3:8000"),
        ({"host": "::1"}, {}, "http://[::1]:8000"),
        ({"ssl_keyfile": "k", "ssl_certfile": "c"}, {}, "https://127.0.0.1:8000"),
        ({"uds": "/tmp/s"}, {}, None),
    ],
)
def test_address_is_one_that_others_can_use(given: dict[str, Any], extra: dict[str, str], expected: str | None) -> None:
    """SCENARIOS 58: port 0 is what the system made of it; a wildcard isn't an address."""
    attachment = Attachment.from_env(server(0), args(**given), {**ENV, **extra})
    assert attachment is not None
    assert attachment._url(app(4711)) == expected


def test_way_to_the_bus_gives_our_address() -> None:
    """Without sending anything."""
    assert local_address_towards("nats://127.0.0.1:1") == "127.0.0.1"
    assert local_address_towards("nats://no.such.host.invalid:1") == "127.0.0.1"


class Rig:
    """An attachment whose engine is the fake one, and whose bus is in memory and may be down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broker = MemoryBroker()
        self.is_down = False
        self.tries_s: list[float] = []
        self.engine = FakeEngine()
        self.engine.death = None  # type: ignore[attr-defined]
        monkeypatch.setattr(connecting, "connect_bus", self.connect)
        monkeypatch.setattr(engine_module, "VllmEngine", lambda *_args, **_kwargs: self.engine)
        attachment = Attachment.from_env(FakeLLM(), args(), ENV)
        assert attachment is not None
        self.attachment = attachment
        self.messages: list[WorkerMessage] = []

    async def connect(self, _config: object, *, name: str) -> Bus:
        """As rlbus.connecting."""
        self.tries_s.append(asyncio.get_running_loop().time())
        if self.is_down:
            raise BrokenError("bus", "no server there")
        return Bus(self.broker.connect(), clock=LoopClock())

    def listen(self) -> Bus:
        """Hear what the worker announces."""
        bus = Bus(self.broker.connect(), clock=LoopClock())
        bus.subscribe("dyn.ns.backend.worker.7", WorkerMessage, lambda message, _: self.messages.append(message))
        return bus


def test_worker_is_announced_once_the_server_listens_and_says_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """From start to stop."""

    async def main() -> None:
        rig = Rig(monkeypatch)
        application = app(8000, is_up=False)
        async with rig.listen():
            rig.attachment.start(application)
            await asyncio.sleep(5.0)
            assert rig.messages == []
            application.state.server.started = True
            await asyncio.sleep(1.0)
            first = rig.messages[0]
            assert isinstance(first, Announcement)
            assert first.descriptor.instance_id == "7"
            await rig.attachment.aclose()
            await asyncio.sleep(0.1)
            assert isinstance(rig.messages[-1], Goodbye)
            await rig.attachment.aclose()

    run(main())


def test_bus_that_is_down_is_tried_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server goes on meanwhile; the worker appears when the bus does."""

    async def main() -> None:
        rig = Rig(monkeypatch)
        rig.is_down = True
        async with rig.listen():
            rig.attachment.start(app(8000))
            await asyncio.sleep(300.0)
            pauses = [later - earlier for earlier, later in zip(rig.tries_s, rig.tries_s[1:], strict=False)]
            assert 1.0 <= pauses[0] <= 1.5
            assert max(pauses) <= MAX_RETRY_S * 1.5
            assert len(rig.tries_s) <= 15
            rig.is_down = False
            await asyncio.sleep(MAX_RETRY_S * 1.5 + 1)
            assert rig.messages
            await rig.attachment.aclose()

    run(main())


def test_server_stops_at_once_while_there_is_no_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause between two attempts is no reason to wait."""

    async def main() -> None:
        rig = Rig(monkeypatch)
        rig.is_down = True
        rig.attachment.start(app(8000))
        await asyncio.sleep(100.0)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await rig.attachment.aclose()
        assert loop.time() - began_s < 0.1

    run(main())


@pytest.mark.parametrize("is_supervised", [False, True])
def test_lost_engine_stops_a_supervised_server(monkeypatch: pytest.MonkeyPatch, is_supervised: bool) -> None:
    """So that it is started anew; nobody would start another one, so that is left alone."""
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)

    async def main() -> None:
        monkeypatch.setitem(ENV, "RLBUS_SUPERVISED", "1" if is_supervised else "")
        rig = Rig(monkeypatch)
        rig.attachment.start(app(8000))
        await asyncio.sleep(5.0)
        assert raised == []
        rig.engine.death = "out of step"  # type: ignore[attr-defined]
        await asyncio.sleep(5.0)
        assert len(raised) == (1 if is_supervised else 0)
        await rig.attachment.aclose()

    run(main())


def test_agent_that_ends_by_itself_is_followed_by_one_that_takes_the_engine_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its weights, who holds the pause, and what became of its ops: the engine has not changed."""

    async def main() -> None:
        rig = Rig(monkeypatch)
        async with rig.listen() as bus:
            rig.attachment.start(app(8000))
            await asyncio.sleep(1.0)
            first = rig.messages[-1]
            assert isinstance(first, Announcement)
            command = Command(op_id="p", term=4, expires_at=bus.clock.now() + 9, body=PauseGeneration(lease_s=60.0))
            bus.publish(subjects.command_to("ns", "backend", "pause_generation", "7"), command)
            await asyncio.sleep(1.0)
            rig.attachment._agent.stop("as a bug would")
            await asyncio.sleep(10.0)
            second = rig.messages[-1]
            assert isinstance(second, Announcement)
            assert second.boot_id != first.boot_id
            assert (second.status.term, second.status.generation) == (4, Generation.PAUSED)
            assert second.status.pause is not None
            assert second.status.drift is None
            assert rig.attachment._agent.journal.find("p").result.status is ResultStatus.OK
            await asyncio.sleep(70.0)
            third = rig.messages[-1]
            assert isinstance(third, Announcement)
            assert (third.status.generation, third.status.pause) == (Generation.RUNNING, None)
            await rig.attachment.aclose()

    run(main())
