"""Nothing waits for ever, and fakes take what the real thing takes: by reading the code, not by running it."""

import ast
import inspect
from typing import Any

import pytest

from rlbus._kv import Kv
from rlbus._kv_jetstream import JetStreamKv
from rlbus._kv_memory import MemoryKv
from rlbus._memory import MemoryTransport
from rlbus._objects import Objects
from rlbus._objects_jetstream import JetStreamObjects
from rlbus._objects_memory import MemoryObjects
from rlbus._supervised import SupervisedTransport
from rlbus._transport import Transport
from rlbus.bus import Bus, ReplyStream
from rlbus.client import FleetClient
from rlbus.schemas.requests import Request
from rlbus.trainer import Trainer
from rlbus.transfer.fake import FakePlane, FakeSource
from rlbus.transfer.gloo_group import GlooGroup
from rlbus.transfer.group import Group
from rlbus.transfer.nccl_group import NcclGroup
from rlbus.transfer.plane import SenderPlane, WeightSource
from rlbus.transfer.torch_plane import TorchPlane
from rlbus.workers.dynamo.engine import DynamoEngine
from rlbus.workers.engines.base import Engine
from rlbus.workers.engines.fake import FakeEngine
from rlbus.workers.engines.torch_engine import TorchEngine
from rlbus.workers.vllm_server.engine import VllmEngine
from tests.test_layout import modules

pytestmark = pytest.mark.unit

# Calls that wait for another process for ever unless they are told for how long.
ENDLESS = {"create_connection", "urlopen", "check_output", "check_call", "communicate", "HTTPConnection"}
LIMITS = {"timeout", "timeout_s", "limit_s", "deadline_s"}
# Coroutines of the public classes that wait for nobody, or are bounded by what they say in their docstring.
UNASKED = {"Bus.aclose", "Trainer.aclose"}


def endless(tree: ast.AST) -> list[int]:
    """Lines with a wait for a peer that nothing ends: no limit, or None for one."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {k.arg: k.value for k in node.keywords}
        limits = [value for key, value in given.items() if key in LIMITS]
        if name == "timeout":
            limits += node.args[:1]
        is_none = any(isinstance(value, ast.Constant) and value.value is None for value in limits)
        if is_none or (name in ENDLESS and not limits):
            lines.append(node.lineno)
    return lines


def test_no_wait_for_a_peer_is_without_a_limit() -> None:
    """SCENARIOS 15: in the whole code, none is left out and none is None."""
    found = {name: lines for name, path in modules() if (lines := endless(ast.parse(path.read_text())))}
    assert found == {}


@pytest.mark.parametrize(
    "text", ["asyncio.timeout(None)", "urlopen(url)", "bus.request(s, m, T, limit_s=None)", "process.communicate()"]
)
def test_a_wait_without_a_limit_is_found(text: str) -> None:
    """So that the check above means something."""
    assert endless(ast.parse(text)) == [1]
    assert endless(ast.parse("asyncio.timeout(3); urlopen(url, timeout=3); bus.request(s, m, T, limit_s=x)")) == []


@pytest.mark.parametrize("kind", [FleetClient, Trainer, Bus, ReplyStream])
def test_every_question_to_a_peer_has_a_limit(kind: type[Any]) -> None:
    """SCENARIOS 15: a number of seconds, never None, and never left to somebody else."""
    for name, function in inspect.getmembers(kind, inspect.iscoroutinefunction):
        if name.startswith("_") or f"{kind.__name__}.{name}" in UNASKED:
            continue
        limits = [p for key, p in inspect.signature(function).parameters.items() if key in LIMITS]
        assert [p.annotation for p in limits] == [float], f"{kind.__name__}.{name}"
        assert all(p.default is p.empty or p.default > 0 for p in limits), f"{kind.__name__}.{name}"
    assert Request.__annotations__["deadline_s"] is float


@pytest.mark.parametrize(
    ("seam", "kind"),
    [
        (Engine, FakeEngine),
        (Engine, TorchEngine),
        (Engine, VllmEngine),
        (Engine, DynamoEngine),
        (Transport, MemoryTransport),
        (Transport, SupervisedTransport),
        (Kv, MemoryKv),
        (Kv, JetStreamKv),
        (Objects, MemoryObjects),
        (Objects, JetStreamObjects),
        (SenderPlane, FakePlane),
        (SenderPlane, TorchPlane),
        (WeightSource, FakeSource),
        (Group, GlooGroup),
        (Group, NcclGroup),
    ],
)
def test_fakes_and_real_things_take_the_same_arguments(seam: type[Any], kind: type[Any]) -> None:
    """SCENARIOS 57: name, kind and default of each, so that no call works on a fake and is a type error elsewhere."""
    for name, function in inspect.getmembers(seam, inspect.isfunction):
        if name.startswith("_"):
            continue
        expected = list(inspect.signature(function).parameters.values())
        actual = list(inspect.signature(getattr(kind, name)).parameters.values())
        same, more = actual[: len(expected)], actual[len(expected) :]
        assert [(p.name, p.kind, p.default) for p in same] == [(p.name, p.kind, p.default) for p in expected], name
        assert all(p.default is not p.empty for p in more), name
