"""From a configuration to a connected Bus."""

from typing import TYPE_CHECKING

from rlbus.bus import Bus
from rlbus.config import BusConfig
from rlbus.errors import ConfigError

if TYPE_CHECKING:
    from rlbus._kv_jetstream import JetStreamKv
    from rlbus._objects import Objects
    from rlbus._supervised import SupervisedTransport


async def connect_bus(config: BusConfig, *, name: str) -> Bus:
    """Connect to the NATS server of `config`, within `config.connect_s`.

    `name` is shown by the server in its list of connections.

    Raises:
        BrokenError: no server there, wrong credentials, or no answer in time; one line that says which.
        ConfigError: the credentials file is none.
    Cancel: nothing is left open.
    """
    # nats-py takes 0.1 s to import; who runs in memory doesn't pay for it.
    from rlbus._nats import connect_nats

    return Bus(await connect_nats(config, name=name))


async def open_kv(bus: Bus, namespace: str) -> "JetStreamKv":
    """The store of `namespace` on the server that `bus` is connected to, made if it isn't there.

    Its revisions begin at the date in milliseconds: they are above those of a store that was lost, and above the terms
    of controllers that ran without one, so that no worker takes its first leader for an old one.

    Raises:
        ConfigError: the server has no JetStream; says how to enable it. BrokenError, DeadlineError: it fails.
    Cancel: the store may be there.
    """
    from rlbus._kv_jetstream import JetStreamKv

    return await JetStreamKv.open(_supervised(bus), _bucket(namespace), int(bus.clock.now() * 1000))


def kv_there(bus: Bus, namespace: str) -> "JetStreamKv":
    """The store of `namespace` if it is there: nothing is made, and without one each call is a BrokenError. Close it.

    Raises: ConfigError: the bus is none to a NATS server.
    """
    from rlbus._kv_jetstream import JetStreamKv

    return JetStreamKv(_supervised(bus), _bucket(namespace))


def open_objects(bus: Bus, namespace: str, *, is_writer: bool = True) -> "Objects":
    """The store of large things of `namespace` on the server that `bus` is connected to; nothing is asked of it yet.

    `is_writer`: makes the store when it is first used. A worker only reads.

    Raises: ConfigError: the bus is none that has one.
    """
    from rlbus._memory import MemoryTransport
    from rlbus._objects_jetstream import JetStreamObjects
    from rlbus._objects_memory import MemoryObjects

    if isinstance(bus.transport, MemoryTransport):
        return MemoryObjects(bus.transport, namespace)
    return JetStreamObjects(_supervised(bus), namespace, is_writer=is_writer)


def _bucket(namespace: str) -> str:
    return f"rlbus_{namespace}"


def _supervised(bus: Bus) -> "SupervisedTransport":
    from rlbus._supervised import SupervisedTransport

    if not isinstance(bus.transport, SupervisedTransport):
        raise ConfigError("transport", type(bus.transport).__name__, "a store needs a connection to a NATS server")
    return bus.transport
