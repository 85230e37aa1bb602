"""What a vLLM server with the plugin tells a sidecar."""

import json
from typing import Any

import pytest
from starlette.requests import Request

from rlbus.errors import EngineError
from rlbus.testing import run
from rlbus.workers.vllm_server.about import ABOUT, About, attach, requests_of
from tests.unit.workers.vllm_server.fake_llm import FakeLLM

pytestmark = pytest.mark.unit


class Application:
    """Notes routes."""

    def __init__(self) -> None:
        self.routes: dict[str, Any] = {}

    def add_api_route(self, path: str, endpoint: Any, **_: Any) -> None:
        """As FastAPI's."""
        self.routes[path] = endpoint


def test_requests_are_told_by_the_ids_that_clients_gave() -> None:
    """Once each, however many samples; nothing where other processes have requests, too."""
    llm = FakeLLM()
    llm.add("a-1", "a")
    llm.add("a-2", "a")
    llm.add("b-1", "")
    assert requests_of(llm) == ("a", "b-1")
    assert requests_of(FakeLLM(num_servers=2)) is None
    assert requests_of(None) is None


@pytest.mark.parametrize(("mode", "is_there"), [("1", True), ("0", False), (None, False)])
def test_route_is_there_in_dev_mode_only(mode: str | None, is_there: bool) -> None:
    """As vLLM's own RL routes; what it answers, a sidecar reads."""
    app, about = Application(), About(boot_id="b", worker="backend/7", requests=("a",))
    attach(app, lambda: about, environ={} if mode is None else {"VLLM_SERVER_DEV_MODE": mode})
    assert (ABOUT in app.routes) == is_there
    if is_there:
        answer = run(app.routes[ABOUT](Request({"type": "http", "headers": []})))
        assert About.parse(json.loads(answer.body)) == about


@pytest.mark.parametrize(
    ("sent", "status"), [(None, 401), ("Bearer wrong", 401), ("Basic key", 401), ("Bearer key", 200), ("bearer b", 200)]
)
def test_a_server_with_keys_tells_nobody_without_one(sent: str | None, status: int) -> None:
    """SCENARIOS 43: vLLM's own keys are for its /v1 only; who asks what is its clients' business."""
    app = Application()
    attach(app, lambda: About(boot_id="b", requests=("secret",)), lambda: ("key", "b"), {"VLLM_SERVER_DEV_MODE": "1"})
    headers = [] if sent is None else [(b"authorization", sent.encode())]
    answer = run(app.routes[ABOUT](Request({"type": "http", "headers": headers})))
    assert (answer.status_code, b"secret" in answer.body) == (status, status == 200)


def test_answer_of_another_version_is_an_error() -> None:
    """Not a wrong guess."""
    with pytest.raises(EngineError, match="another shape"):
        About.parse({"boot": 1})
