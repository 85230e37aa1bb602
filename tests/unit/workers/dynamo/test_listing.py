"""What Dynamo's discovery says: every bad descriptor costs itself only, and numbers stay what they are."""

import json
from typing import Any

import pytest

from rlbus.errors import EngineError
from rlbus.workers.dynamo.listing import LeftOut, Listed, identity_of, parse_answer, parse_worker
from tests.unit.workers.dynamo.fake_dynamo import answer_of, descriptor

pytestmark = pytest.mark.unit

# The answer of Dynamo 1.6.1, as seen.
SEEN = (
    '{"protocol_version":1,"namespace":"dynamo","workers":[{"namespace":"dynamo","component":"backend","endpoint":"rl",'
    '"instance_id":14487131679317648894,"transport":{"nats_tcp":"dynamo_backend.rl-c90ca181980965fe"},'
    '"request_plane_url":"dyn://dynamo.backend.rl","system_url":"http://10.0.0.5:18081","model":"/models/tiny",'
    '"routes":["abort_request","pause_generation"],"world_size":2}]}'
)


def left_out(item: Any) -> str:
    """Why that one is left out."""
    found = parse_worker(item)
    assert isinstance(found, LeftOut)
    return found.reason


def test_an_answer_of_dynamo_is_understood_and_the_id_is_not_rounded() -> None:
    """An unsigned 64-bit integer above what a double holds."""
    (worker,) = parse_answer(json.loads(SEEN)).workers
    assert worker == Listed(
        "backend",
        "14487131679317648894",
        "http://10.0.0.5:18081",
        "/models/tiny",
        frozenset({"abort_request", "pause_generation"}),
        2,
    )
    assert worker.who == "backend/14487131679317648894"


@pytest.mark.parametrize(
    ("number", "kept"),
    [(0, "0"), (2**64 - 1, str(2**64 - 1)), ("18446744073709551615", "18446744073709551615"), ("007", "7")],
)
def test_every_unsigned_64_bit_id_is_kept_exactly(number: Any, kept: str) -> None:
    """Also one that somebody wrote as text, so that JavaScript doesn't round it."""
    found = parse_worker(descriptor(instance_id=number))
    assert isinstance(found, Listed)
    assert found.instance_id == kept


@pytest.mark.parametrize("number", [-1, 2**64, 1.4487131679317649e19, True, None, "", "12x", "9" * 30, [1]])
def test_an_id_that_is_none_or_was_rounded_leaves_its_worker_out(number: Any) -> None:
    """Rather than a worker under another one's name."""
    assert "is no unsigned 64-bit integer" in left_out(descriptor(instance_id=number))


def test_unknown_fields_are_ignored_and_an_unset_world_size_is_unknown() -> None:
    """A newer Dynamo says more, an older one less."""
    item = descriptor(admin_base_url="http://x", lora={"max": 3}, health=["new"])
    del item["world_size"]
    found = parse_worker(item)
    assert isinstance(found, Listed)
    assert found.world_size is None


def test_a_descriptor_with_an_error_leaves_only_its_worker_out() -> None:
    """SCENARIOS 16, 46: its reason is kept, its name is known; the others are there."""
    sick = {**descriptor(7), "error": "rl endpoint did not answer within 5 s"}
    for name in ("routes", "system_url", "world_size", "model"):
        del sick[name]
    answer = parse_answer(answer_of(descriptor(1), sick, descriptor(2, "http://other:9000")))
    assert [worker.instance_id for worker in answer.workers] == ["1", "2"]
    assert answer.left_out == (
        LeftOut("backend/7", "Dynamo says: rl endpoint did not answer within 5 s", is_known=True),
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (None, "names no system_url"),
        ("", "names no system_url"),
        (7, "names no system_url"),
        ("http://::1:18081", "system_url can't be used"),
        ("http://[::]:18081", "address to listen on"),
        ("http://0.0.0.0:18081", "address to listen on"),
        ("nats://host:4222", "system_url can't be used"),
        ("http://host:99999", "system_url can't be used"),
    ],
)
def test_a_url_that_nobody_can_reach_is_named_as_the_reason(url: Any, words: str) -> None:
    """SCENARIOS 58: an IPv6 literal without brackets, a wildcard bind."""
    assert words in left_out(descriptor(system_url=url))


def test_an_ipv6_literal_in_brackets_is_taken() -> None:
    """SCENARIOS 58."""
    found = parse_worker(descriptor(system_url="http://[::1]:18081/"))
    assert isinstance(found, Listed)
    assert found.system_url == "http://[::1]:18081"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"component": "back end"}, "can't be a component"),
        ({"component": "controller"}, "can't be a component"),
        ({"component": None}, "can't be a component"),
        ({"routes": None}, "--enable-rl"),
        ({"routes": "pause_generation"}, "no list of names"),
        ({"routes": [1]}, "no list of names"),
        ({"routes": ["r"] * 257}, "no list of names"),
        ({"world_size": 0}, "no number of ranks"),
        ({"world_size": True}, "no number of ranks"),
        ({"world_size": "2"}, "no number of ranks"),
    ],
)
def test_a_malformed_descriptor_says_what_is_wrong_with_it(change: dict[str, Any], words: str) -> None:
    """And one that is no object at all is left out, too."""
    assert words in left_out({**descriptor(), **change})
    assert "not an object" in left_out("worker")


def test_a_worker_that_is_listed_twice_is_taken_once_and_contradictions_are_not_believed() -> None:
    """SCENARIOS 25: the same entry again is fine; another URL for one name, or one URL for two names, is not."""
    same = parse_answer(answer_of(descriptor(1), descriptor(1)))
    assert [worker.instance_id for worker in same.workers] == ["1"]
    assert same.left_out == ()
    other = parse_answer(answer_of(descriptor(1), descriptor(1, "http://b:1"), descriptor(2, "http://c:1")))
    assert [worker.instance_id for worker in other.workers] == ["2"]
    assert "listed twice" in other.left_out[0].reason
    shared = parse_answer(answer_of(descriptor(1), descriptor(2)))
    assert shared.workers == ()
    assert {out.who for out in shared.left_out} == {"backend/1", "backend/2"}
    assert all("same system_url" in out.reason for out in shared.left_out)


def test_a_component_can_be_chosen() -> None:
    """The others aren't even reported."""
    answer = parse_answer(answer_of(descriptor(1), descriptor(2, "http://p:1", component="prefill")), "prefill")
    assert [worker.who for worker in answer.workers] == ["prefill/2"]
    assert answer.left_out == ()


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "text",
        {},
        {"protocol_version": 1},
        {"protocol_version": 1, "workers": {}},
        {"workers": []},
        {"protocol_version": 2, "workers": []},
        {"protocol_version": True, "workers": []},
        {"protocol_version": 1, "workers": [{}] * 10_001},
    ],
)
def test_what_is_no_answer_of_dynamos_discovery_is_an_error_and_not_an_empty_fleet(data: Any) -> None:
    """An empty list would let everybody go."""
    with pytest.raises(EngineError, match="Dynamo's discovery"):
        parse_answer(data)


def test_a_worker_names_itself_in_its_metrics() -> None:
    """By the hexadecimal of its instance id."""
    metrics = (
        "# HELP dynamo_component_uptime_seconds x\n"
        'other{a="b"} 1\n'
        'dynamo_x{dynamo_component="backend",dynamo_namespace="dynamo",model="/a,{c}",worker_id="d0ec8155ce1fadd2"} 0\n'
    )
    labels = identity_of(metrics)
    assert (labels["dynamo_component"], labels["model"]) == ("backend", "/a,{c}")
    assert int(labels["worker_id"], 16) == 15054549859923111378
    assert identity_of("nothing 1\n") == {}
