"""`rlbus.connect`: one connection to the bus, and everything that hangs on it."""

import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from rlbus._addresses import is_elsewhere, is_loopback, own_address_towards
from rlbus._calls import Calls
from rlbus._snapshots import open_snapshots
from rlbus.bus import Bus
from rlbus.client import FleetClient
from rlbus.config import BusConfig
from rlbus.errors import BrokenError, ClosedError, ConfigError
from rlbus.schemas import SnapshotKind
from rlbus.trainer import Trainer
from rlbus.transfer.plane import SenderPlane

_log = logging.getLogger("rlbus.session")


def default_caller(kind: str) -> str:
    """Who we are in events and logs: kind, host and process."""
    return f"{kind}:{socket.gethostname()}:{os.getpid()}"


class Session:
    """An open connection to one namespace; get it from `rlbus.connect`, which closes it.

    `bus` is the typed bus, `fleet` the client of the controller.
    """

    def __init__(self, bus: Bus, namespace: str, *, caller: str | None = None, host: str | None = None) -> None:
        self.bus = bus
        self.namespace = namespace
        self._caller = caller
        # Our address as the bus sees it; None: everything is on this machine.
        self._host = host
        self._calls = Calls("session")
        name = default_caller("python") if caller is None else caller
        self.fleet = FleetClient(bus, namespace, caller=name, calls=self._calls)
        self._trainers: list[Trainer] = []
        self._is_closed = False

    def trainer(
        self,
        *,
        backend: str = "auto",
        host: str | None = None,
        plane: SenderPlane | None = None,
        snapshot: SnapshotKind | str = SnapshotKind.NONE,
        snapshot_dir: Path | str | None = None,
    ) -> Trainer:
        """A trainer on this connection; it is closed with the session. Needs torch unless `plane` is given.

        Args:
            backend: "gloo", "nccl", or "auto" (nccl when torch sees a GPU).
            host: the address under which workers reach this process; None is the one that leads to the bus server.
            plane: a data plane of your own, instead of torch's process groups.
            snapshot: what is kept of the last version for workers that come back behind it. "none": nothing, they wait
                for the next update. "memory": a copy in this process, sent again over the group (one model of host
                memory, two while an update is sent). "disk": a safetensors folder in `snapshot_dir`, which the workers
                read by themselves, also when this process is gone; complete when `update_weights` returns, which waits
                for the disk after the engines have gone on, 30 s at most. A disk that hangs costs the snapshot alone.
            snapshot_dir: for "disk"; below a weight root of every worker. Two versions' worth of space. Snapshots are
                in a folder of the namespace's name there: namespaces of one bus may share it, several buses not.

        Raises:
            ClosedError: after the session. ConfigError: torch isn't installed, or the snapshot makes no sense.
        """
        if self._is_closed:
            raise ClosedError("session")
        snapshots = open_snapshots(snapshot, snapshot_dir, self.namespace)
        if plane is None:
            plane = _torch_plane(backend, self._host if host is None else host)
        caller = default_caller("trainer") if self._caller is None else self._caller
        trainer = Trainer(self.bus, self.namespace, plane, caller=caller, snapshots=snapshots)
        self._trainers.append(trainer)
        return trainer

    async def aclose(self) -> None:
        """End the calls that run, close trainers, then the connection. Idempotent.

        Whoever waits for such a call gets ClosedError, after its op was taken back, in at most 5 s; of an update, see
        `Trainer.update_weights`. Cancel: the rest is closed first, which the undoing of calls takes as long as said.
        """
        self._is_closed = True
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.bus.aclose)
            for trainer in self._trainers:
                stack.push_async_callback(trainer.aclose)
            stack.push_async_callback(self._calls.aclose)


@contextlib.asynccontextmanager
async def connect(
    url: str | None = None,
    *,
    namespace: str | None = None,
    token: str | None = None,
    user: str | None = None,
    password: str | None = None,
    creds_file: str | None = None,
    connect_s: float | None = None,
    caller: str | None = None,
) -> AsyncIterator[Session]:
    """Connect to the bus: `async with rlbus.connect("nats://...", namespace="prod") as bus`.

    What isn't given comes from the environment (RLBUS_URL, RLBUS_NAMESPACE, ...; see `rlbus.config`).

    Raises:
        ConfigError: no URL, or a setting is wrong. BrokenError: no server there, or it refused the credentials; in at
            most `connect_s` seconds.
    Cancel: the connection is closed.
    """
    config = BusConfig.from_env(
        url=url,
        namespace=namespace,
        token=token,
        user=user,
        password=password,
        creds_file=creds_file,
        connect_s=connect_s,
    )
    from rlbus.connecting import connect_bus

    name = default_caller("python") if caller is None else caller
    bus = await connect_bus(config, name=name)
    try:
        host = await _address_towards(config)
    except BaseException:
        await bus.aclose()
        raise
    session = Session(bus, config.namespace, caller=caller, host=host)
    try:
        yield session
    finally:
        await session.aclose()


async def _address_towards(config: BusConfig) -> str | None:
    """Our own address on the way to the bus servers, where workers can be expected to reach us; None on loopback."""
    try:
        own = await own_address_towards(config.servers, config.connect_s)
    except (OSError, UnicodeError) as exc:
        raise BrokenError(config.url, f"no way to its address: {exc}") from exc
    if not is_loopback(own):
        return own
    if is_elsewhere(config.servers):
        _log.warning("the way to %s is by loopback: only workers on this machine reach this process", config.url)
    return None


def _torch_plane(backend: str, host: str | None) -> SenderPlane:
    try:
        from rlbus.transfer.torch_plane import TorchPlane
    except ImportError as exc:
        raise ConfigError(
            "trainer", backend, f'sending weights needs torch: pip install "rlbus[torch]" ({exc})'
        ) from exc
    return TorchPlane(backend=backend, host=host)
