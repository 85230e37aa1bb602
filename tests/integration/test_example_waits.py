"""The example of prime-rl's orchestrator asks again while nobody leads, and takes any other refusal as it is."""

import http.server
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import httpx
import pytest

from tests.integration.http_servers import served

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "prime_rl_like.py"
pytestmark = pytest.mark.integration


class Controller(http.server.BaseHTTPRequestHandler):
    """Answers each request with the next of `statuses`, and notes what was asked."""

    statuses: ClassVar[list[int]] = []
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """Answer."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.append(f"{self.command} {self.path.partition('?')[0]}")
        body = json.dumps({"weight_version": "0.7"}).encode()
        self.send_response(self.statuses.pop(0))
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-rlbus-version", "0.8")
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Not on stderr."""


@pytest.fixture
def controller() -> Iterator[tuple[str, type[Controller]]]:
    kind = type("OwnController", (Controller,), {"statuses": [], "asked": []})
    with served(kind) as url:
        yield url, kind


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prime_rl_like", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_asks_again_only_while_what_is_told_passes_by_itself(controller: tuple[str, type[Controller]]) -> None:
    """503 is that; 409 ends it at once, and the fleet is resumed all the same."""
    url, kind = controller
    admin = example().AdminPlane(url)
    kind.statuses += [503, 503, 200]
    assert admin.last_step() == 7
    kind.statuses += [503, 200, 503, 409, 503, 200]
    with pytest.raises(httpx.HTTPStatusError, match="409"), admin.paused():
        admin.update_weights(Path("/step_8"))
    update = ["POST /pause"] * 2 + ["POST /update_weights"] * 2 + ["POST /resume"] * 2
    assert kind.asked == ["GET /weight_info"] * 3 + update
    assert kind.statuses == []
