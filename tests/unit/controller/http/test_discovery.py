"""Dynamo's list of workers, from a view of the fleet."""

import json
from typing import Any

import msgspec
import pytest

from rlbus.controller.http.discovery import (
    LISTED_DEAD_S,
    MAX_ERROR_CHARS,
    advertised,
    answer,
    is_wildcard,
    listed,
    plain,
    urls_of,
)
from rlbus.controller.testing import announcement
from rlbus.errors import ConfigError
from rlbus.schemas import FleetView, Liveness, MemberView, WorkerId

pytestmark = pytest.mark.unit

# What Dynamo's clients allow at all. Source: FACTS.md (Dynamo 1.6.1).
ALLOWED = {
    "namespace",
    "component",
    "endpoint",
    "instance_id",
    "transport",
    "request_plane_url",
    "system_url",
    "admin_base_url",
    "world_size",
    "model",
    "routes",
    "error",
}


def member(worker: str, *, liveness: Liveness = Liveness.ALIVE, age_s: float = 1.0, **changes: Any) -> MemberView:
    """A worker as the controller sees it; `changes` go to its descriptor."""
    said = announcement(worker, **changes)
    return MemberView(
        worker=WorkerId(worker),
        liveness=liveness,
        admitted=True,
        descriptor=said.descriptor,
        status=said.status,
        boot_id="boot",
        age_s=age_s,
    )


def view_of(*members: MemberView) -> FleetView:
    """A fleet."""
    return FleetView(namespace="test", term=1, version=None, epoch=None, op_id=None, members=members)


def rows(*members: MemberView, probed: dict[str, str | None] | None = None) -> list[dict[str, Any]]:
    """What is answered; every address is fine unless `probed` says otherwise."""
    view = view_of(*members)
    found = listed(view, None)
    well = dict.fromkeys(urls_of(found))
    result: list[dict[str, Any]] = answer(view, found, well | (probed or {}))["workers"]
    return result


def test_the_answer_is_dynamos_to_the_letter() -> None:
    """Golden: names, order, types and nesting, with the largest instance id as a number that isn't rounded."""
    worker = member(
        "backend/18446744073709551615",
        system_url="http://10.0.0.1:18081",
        routes=("update_weights", "flush_cache"),
        world_size=2,
    )
    view = view_of(worker)
    text = json.dumps(answer(view, [worker], {"http://10.0.0.1:18081": None}))
    assert text == (
        '{"protocol_version": 1, "namespace": "test", "workers": [{"namespace": "test", "component": "backend", '
        '"endpoint": "rl", "instance_id": 18446744073709551615, '
        '"transport": {"nats_tcp": "dyn.test.backend.rl.routes.18446744073709551615"}, '
        '"request_plane_url": "dyn://test.backend.rl", "system_url": "http://10.0.0.1:18081", '
        '"admin_base_url": "http://10.0.0.1:18081", "model": "m", "routes": ["flush_cache", '
        '"get_weight_version", "liveness_probe", "update_weights_from_distributed"], "world_size": 2}]}'
    )


def test_no_field_is_null_and_none_is_foreign() -> None:
    """Whatever a worker lacks is left out, as Dynamo does."""
    found = rows(member("backend/1"), member("backend/2", model=""), member("x/3", liveness=Liveness.SUSPECT))
    assert all(set(row) <= ALLOWED and None not in row.values() for row in found)
    assert "system_url" not in found[0]
    assert "model" not in found[1]


def test_the_order_is_by_component_and_then_by_number() -> None:
    """9 before 10, and however the view is ordered."""
    found = rows(member("b/10"), member("b/9"), member("a/100"))
    assert [(r["component"], r["instance_id"]) for r in found] == [("a", 100), ("b", 9), ("b", 10)]


def test_who_said_goodbye_is_gone_and_who_died_is_named_for_a_while() -> None:
    """Who waits for a complete fleet hears who is missing; a successor doesn't wait for it."""
    dead = member("backend/2", liveness=Liveness.DEAD, age_s=LISTED_DEAD_S)
    long_dead = member("backend/3", liveness=Liveness.DEAD, age_s=LISTED_DEAD_S + 1)
    found = rows(member("backend/1", liveness=Liveness.LEFT), dead, long_dead)
    assert [(r["instance_id"], r["error"]) for r in found] == [(2, "dead: no heartbeat for 60 s")]


def test_a_silent_worker_has_an_error_and_nothing_to_call() -> None:
    """As Dynamo's: identity and model only, so that nobody calls it."""
    [row] = rows(member("backend/1", liveness=Liveness.SUSPECT, age_s=13.0, system_url="http://h:1"))
    assert row["error"] == "no heartbeat for 13 s; it may be gone"
    assert row["routes"] == []
    assert {"system_url", "admin_base_url", "world_size"} & set(row) == set()
    assert row["model"] == "m"


def test_an_address_that_doesnt_answer_is_an_error() -> None:
    """And one that wasn't asked isn't taken for well."""
    worker = member("backend/1", system_url="http://h:1")
    assert rows(worker, probed={"http://h:1": "http://h:1 doesn't answer"})[0]["error"] == "http://h:1 doesn't answer"
    assert answer(view_of(worker), [worker], {})["workers"][0]["error"] == "it wasn't probed"


def test_wildcard_binds_are_never_advertised() -> None:
    """SCENARIOS 58: an address to listen on is none to reach; the error says what to set."""
    for url in ("http://0.0.0.0:1", "http://[::]:1", "http://0:1", "http://[::ffff:0.0.0.0]:1", "http://0x0:1"):
        [row] = rows(member("backend/1", system_url=url))
        assert "system_url" not in row
        assert "RLBUS_ADVERTISE_HOST" in row["error"], url


def test_ipv6_literals_stand_in_brackets() -> None:
    """SCENARIOS 58: what parses is passed on in brackets; what doesn't is an error of that worker alone."""
    good, bad = (
        member("backend/1", system_url="http://[::1]:18081/"),
        member("backend/2", system_url="http://::1:18081"),
    )
    found = rows(good, bad)
    assert found[0]["system_url"] == found[0]["admin_base_url"] == "http://[::1]:18081"
    assert "brackets" in found[1]["error"]


def test_two_workers_behind_one_address_are_both_named() -> None:
    """SCENARIOS 25: calls for both would reach one of them; also when a filter hides the other."""
    one, two = member("backend/1", system_url="http://h:1"), member("decode/2", system_url="http://h:1")
    assert [r["error"] for r in rows(one, two)] == ["2 workers announce http://h:1"] * 2
    view = view_of(one, two)
    found = listed(view, ["decode"])
    assert answer(view, found, {"http://h:1": None})["workers"][0]["error"] == "2 workers announce http://h:1"


def test_components_and_namespaces_are_filters() -> None:
    """Another namespace has nobody here."""
    view = view_of(member("a/1"), member("b/2"), member("c/3"))
    assert [m.worker for m in listed(view, ["c", "a"])] == ["a/1", "c/3"]
    assert [m.worker for m in listed(view, None, ["x", "test"])] == ["a/1", "b/2", "c/3"]
    assert listed(view, None, ["x"]) == []


def test_only_living_workers_with_a_usable_address_are_probed() -> None:
    """Each once."""
    members = [
        member("a/1", system_url="http://h:1/"),
        member("a/2", system_url="http://h:1"),
        member("a/3", system_url="http://h:3", liveness=Liveness.SUSPECT),
        member("a/4", system_url="http://0.0.0.0:4"),
        member("a/5"),
    ]
    assert urls_of(members) == ("http://h:1",)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://me:secret@h:1", "credentials"),
        ("http://h:1?x=1", "query"),
        ("http://h:1/#x", "fragment"),
        ("ftp://h:1", "no http"),
        ("h:1", "no http"),
        ("", "no http"),
        ("http://h:0", "no http"),
        ("http://h:99999", "no URL"),
        ("http://[::1", "no URL"),
        ("http://[fe80::1%25eth0]:1", "zone"),
        ("http://me:secret@h:99999", "no URL"),
    ],
)
def test_an_address_that_nobody_should_use_is_refused_without_its_secrets(url: str, problem: str) -> None:
    """Credentials in it are never shown."""
    with pytest.raises(ConfigError, match=problem) as caught:
        advertised(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "http://h:1"),
        ("https://H.example/", "https://h.example"),
        ("http://h:1/base/", "http://h:1/base"),
        ("http://[FD00::1]:80", "http://[fd00::1]:80"),
        ("http://127.0.0.1:5", "http://127.0.0.1:5"),
    ],
)
def test_an_address_is_given_in_one_form(url: str, expected: str) -> None:
    """So that clients can compare."""
    assert advertised(url) == expected


def test_names_are_no_wildcards() -> None:
    """Nor are addresses that begin with zeros."""
    assert [is_wildcard(h) for h in ("host", "0.0.0.1", "::1", "10.0.0.0", "localhost")] == [False] * 5
    assert is_wildcard("*")


def test_an_error_is_one_bounded_printable_line() -> None:
    """Clients refuse control and directional characters, and more than 2,048 bytes."""
    text = plain("a\nb\u202ec\x00" + "\U0001f600" * 1000)
    assert text.startswith("a b c ")
    assert len(text) == MAX_ERROR_CHARS
    assert len(text.encode()) <= 2048
    assert text.isprintable()


def test_rows_encode_ids_as_numbers() -> None:
    """Also through another encoder."""
    [row] = rows(member("backend/9007199254740993"))
    assert b'"instance_id":9007199254740993' in msgspec.json.encode(row)
