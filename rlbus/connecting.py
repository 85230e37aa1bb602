"""From a configuration to a connected Bus."""

from rlbus.bus import Bus
from rlbus.config import BusConfig


async def connect_bus(config: BusConfig, *, name: str) -> Bus:
    """Connect to the NATS server of `config`, within `config.connect_s`.

    `name` is shown by the server in its list of connections.

    Raises:
        BrokenError: no server there, wrong credentials, or no answer in time; one line that says which.
    Cancel: nothing is left open.
    """
    # nats-py takes 0.1 s to import; who runs in memory doesn't pay for it.
    from rlbus._nats import connect_nats

    return Bus(await connect_nats(config, name=name))
