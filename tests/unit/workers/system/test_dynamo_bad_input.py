"""Bad input on each of Dynamo's routes: an error in Dynamo's shape, and nothing is done."""

from typing import Any

import httpx
import pytest

from rlbus._engine_routes import engine_routes
from rlbus.workers.system.testing import Front, on_surface

pytestmark = pytest.mark.unit

NAMES = [
    "abort_request",
    "flush_cache",
    "get_weight_version",
    "liveness_probe",
    "pause_generation",
    "resume_generation",
    "set_weight_version",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
]
# What Dynamo and SGLang have in common.
WHOLE_UPDATE = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}


async def error(front: Front, route: str, body: Any = None, **headers: str) -> dict[str, Any]:
    """A call that a handler answers with an error, which comes with 200."""
    answer = await front.post(f"/engine/{route}", body, **headers)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    assert said["status"] == "error", said
    assert said["message"]
    return said


@pytest.mark.parametrize("route", [*NAMES, "nowhere"])
@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [(b"{", "application/json", 400), (b"{}", "text/plain", 415), (b"\xff", "application/json", 400)],
)
def test_what_is_no_json_is_an_http_error_in_dynamos_shape(route: str, content: bytes, kind: str, status: int) -> None:
    """As Dynamo's system server says it; nothing is done."""
    known = route in NAMES and route != "update_weights_from_tensor"

    async def scenario(front: Front) -> None:
        headers = {"content-type": kind}
        answer = await front.client.post(f"/engine/{route}", content=content, headers=headers)
        if status == 415 or known:
            assert answer.status_code == status
            assert answer.json()["error"]
        assert answer.json().get("status", "error") == "error"
        assert set(front.rig.engine.calls) <= {"start", "observe"}

    on_surface(scenario)


@pytest.mark.parametrize("route", NAMES)
@pytest.mark.parametrize("body", [[], "x", 1, {"nonsense": 1}])
def test_what_is_no_fitting_object_is_a_handlers_error(route: str, body: Any) -> None:
    """200 with an error, as Dynamo; an unknown field is named."""

    async def scenario(front: Front) -> None:
        said = await error(front, route, body)
        if isinstance(body, dict) and route != "update_weights_from_tensor":
            assert "nonsense" in said["message"] or "Missing" in said["message"]
        assert set(front.rig.engine.calls) <= {"start", "observe"}

    on_surface(scenario)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("pause_generation", {"mode": "freeze"}),
        ("pause_generation", {"mode": None}),
        ("pause_generation", {"mode": ["keep"]}),
        ("pause_generation", {"clear_cache": "yes"}),
        ("pause_generation", {"clear_cache": 1}),
        ("abort_request", {}),
        ("abort_request", {"request_id": ""}),
        ("abort_request", {"request_id": 7}),
        ("abort_request", {"request_id": ["a"]}),
        ("set_weight_version", {}),
        ("update_weights_from_disk", {}),
        ("update_weights_from_disk", {"model_path": ""}),
        ("update_weights_from_disk", {"model_path": 7}),
        ("update_weights_from_disk", {"model_path": "/x", "weight_version": "newest"}),
        ("update_weights_from_distributed", {}),
        ("update_weights_from_distributed", {"weight_dir": 7}),
        ("update_weights_from_distributed", {"names": ["a"]}),
        ("update_weights_from_tensor", {}),
    ],
)
def test_fields_of_another_kind_are_refused_and_nothing_is_done(route: str, body: Any) -> None:
    """SCENARIOS 41: a malformed pause changes nothing."""

    async def scenario(front: Front) -> None:
        await error(front, route, body)
        assert set(front.rig.engine.calls) <= {"start", "observe"}
        assert front.rig.agent.state.pause is None

    on_surface(scenario)


@pytest.mark.parametrize("route", NAMES)
def test_without_the_token_no_route_does_anything(route: str) -> None:
    """SCENARIOS 43: every one of them."""

    async def scenario(front: Front) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer: httpx.Response = await front.post(f"/engine/{route}", {}, **headers)
            assert (answer.status_code, answer.json()["status"]) == (401, "error")
            assert answer.json()["error"] == "Unauthorized"
        assert set(front.rig.engine.calls) <= {"start", "observe"}

    on_surface(scenario, tokens=("right",))


def test_tensors_in_a_body_are_refused_in_dynamos_words_and_not_advertised() -> None:
    """Dynamo lists the route and says then that it isn't there; who asks here for the routes doesn't find it."""

    async def scenario(front: Front) -> None:
        said = await error(front, "update_weights_from_tensor", {"serialized_named_tensors": ["AA=="]})
        assert said["message"] == "update_weights_from_tensor is not implemented"
        assert "update_weights_from_tensor" not in engine_routes(front.rig.agent.descriptor.routes)

    on_surface(scenario)


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("update_weights_from_disk", {"model_path": "/x", "flush_cache": True}, "flush_cache"),
        ("update_weights_from_distributed", {**WHOLE_UPDATE, "flush_cache": True}, "flush_cache"),
        ("update_weights_from_distributed", {**WHOLE_UPDATE, "load_format": "dtensor"}, "load_format"),
        ("abort_request", {"rid": "a"}, "rid"),
    ],
)
def test_sglangs_forms_of_these_routes_are_refused_and_the_field_is_named(
    route: str, body: dict[str, Any], field: str
) -> None:
    """Other bodies under the same names: not taken for Dynamo's."""

    async def scenario(front: Front) -> None:
        assert field in (await error(front, route, body))["message"]
        assert set(front.rig.engine.calls) <= {"start", "observe"}

    on_surface(scenario)
