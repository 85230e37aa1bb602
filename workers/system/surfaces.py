"""Every surface that a worker has. Each is a list of endpoints; a path belongs to one of them."""

from rlbus.workers.system.app import Door
from rlbus.workers.system.base import base_endpoints
from rlbus.workers.system.calls import Endpoint
from rlbus.workers.system.dynamo import dynamo_endpoints
from rlbus.workers.system.vllm import vllm_endpoints


def all_endpoints(door: Door, base_prefix: str = "") -> list[Endpoint]:
    """What `make_app` serves, or `make_routes` puts into another application."""
    return [*base_endpoints(door, base_prefix), *dynamo_endpoints(), *vllm_endpoints()]
