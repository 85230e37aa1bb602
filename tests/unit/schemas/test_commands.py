"""Routes: the tag of a body is the token of its subject."""

import typing

import msgspec
import pytest

from rlbus.schemas import (
    QUERY_ROUTES,
    Command,
    CommandBody,
    FlushCache,
    GetVersion,
    PauseGeneration,
    PauseMode,
    ReceiveWeights,
    Version,
    is_token,
    route_of,
)

pytestmark = pytest.mark.unit

ROUTES = {body.__struct_config__.tag for body in typing.get_args(CommandBody)}


@pytest.mark.parametrize(
    ("body", "route"),
    [
        (PauseGeneration(), "pause_generation"),
        (FlushCache(), "flush_cache"),
        (GetVersion(), "get_weight_version"),
        (
            ReceiveWeights(update_op_id="u", epoch=1, version=Version(), manifest_digest="d", bucket_bytes=1),
            "update_weights_from_distributed",
        ),
    ],
)
def test_the_route_of_a_body_is_its_tag(body: CommandBody, route: str) -> None:
    """In Dynamo's names where Dynamo has the route."""
    assert route_of(body) == route
    assert msgspec.json.decode(msgspec.json.encode(body))["route"] == route


def test_every_route_is_a_token_of_its_own() -> None:
    """It stands in a subject."""
    assert len(ROUTES) == len(typing.get_args(CommandBody))
    assert all(isinstance(route, str) and is_token(route) for route in ROUTES)


def test_dynamos_routes_keep_their_names() -> None:
    """Those that its RL workers advertise and this contract has too (FACTS, seen with Dynamo 1.6.1)."""
    dynamo = {
        "abort_request",
        "destroy_weights_update_group",
        "flush_cache",
        "get_weight_version",
        "init_weights_update_group",
        "pause_generation",
        "resume_generation",
        "update_weights_from_disk",
        "update_weights_from_distributed",
    }
    assert dynamo <= ROUTES


def test_query_routes_exist_and_change_nothing() -> None:
    """No mutation is among them."""
    assert QUERY_ROUTES <= ROUTES
    assert {"hello", "get_status", "get_outcome", "get_weight_version"} == QUERY_ROUTES


def test_a_pause_keeps_requests_and_clears_caches_unless_told_otherwise() -> None:
    """The defaults of the wire, also when a peer leaves the fields out."""
    wire = b'{"op_id":"o","term":1,"expires_at":2,"body":{"route":"pause_generation"}}'
    command = msgspec.json.decode(wire, type=Command)
    assert command.body == PauseGeneration(mode=PauseMode.KEEP, clear_cache=True, owner=None)
    assert command.members is None
