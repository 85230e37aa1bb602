"""Who a worker is, and its bounds."""

from typing import Any

import pytest

from rlbus.errors import ConfigError
from rlbus.schemas import is_instance_id
from rlbus.workers.config import AgentConfig, Identity, random_instance_id

pytestmark = pytest.mark.unit


def test_identity_comes_from_arguments_then_environment_then_chance() -> None:
    """A random id differs from start to start."""
    env = {"RLBUS_COMPONENT": "decode", "RLBUS_INSTANCE_ID": "18446744073709551615"}
    assert Identity.from_env(environ=env) == Identity(component="decode", instance_id="18446744073709551615")
    assert Identity.from_env(environ=env, component="prefill", instance_id="3") == Identity(
        component="prefill", instance_id="3"
    )
    ids = {Identity.from_env(environ={}).instance_id for _ in range(50)}
    assert len(ids) == 50
    assert all(is_instance_id(i) for i in ids)
    assert is_instance_id(random_instance_id())


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"component": "controller"}, "component"),
        ({"component": "a.b"}, "component"),
        ({"instance_id": "007"}, "instance_id"),
        ({"instance_id": "18446744073709551616"}, "instance_id"),
        ({"instance_id": "-1"}, "instance_id"),
    ],
)
def test_bad_identity_names_the_field(fields: dict[str, str], name: str) -> None:
    """Before it could break a subject."""
    with pytest.raises(ConfigError) as caught:
        Identity(**fields)
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"heartbeat_s": 0}, "heartbeat_s"),
        ({"observe_s": float("inf")}, "observe_s"),
        ({"list_s": 0.0}, "list_s"),
        ({"progress_s": 1.5}, "progress_s"),
        ({"jitter": 1.0}, "jitter"),
        ({"weight_roots": ("relative",)}, "weight_roots"),
        ({"lora_roots": ("relative",)}, "lora_roots"),
        ({"lora_cache_dir": "relative"}, "lora_cache_dir"),
        ({"lora_cache_bytes": 0}, "lora_cache_bytes"),
        ({"lora_poll_s": 0.0}, "lora_poll_s"),
    ],
)
def test_bad_bound_names_the_field(fields: dict[str, Any], name: str) -> None:
    """No bound may be absent or endless."""
    with pytest.raises(ConfigError) as caught:
        AgentConfig(**fields)
    assert caught.value.name == name


def test_weight_roots_come_from_the_environment() -> None:
    """Several, as a path list; none means that nothing may be loaded from disk."""
    assert AgentConfig.from_env(environ={}).weight_roots == ()
    assert AgentConfig.from_env(environ={"RLBUS_WEIGHT_ROOTS": "/a:/b/c"}).weight_roots == ("/a", "/b/c")
    given = AgentConfig.from_env(environ={"RLBUS_WEIGHT_ROOTS": "/a"}, weight_roots=("/z",))
    assert given.weight_roots == ("/z",)


def test_where_adapters_come_from_and_lie_comes_from_the_environment() -> None:
    """As the roots of weights; no folder means a temporary one."""
    empty = AgentConfig.from_env(environ={})
    assert (empty.lora_roots, empty.lora_cache_dir) == ((), None)
    environ = {"RLBUS_LORA_ROOTS": "/a:/b", "RLBUS_LORA_CACHE_DIR": "/c"}
    config = AgentConfig.from_env(environ=environ)
    assert (config.lora_roots, config.lora_cache_dir) == (("/a", "/b"), "/c")


def test_state_dir_comes_from_the_environment_and_has_to_be_absolute() -> None:
    """Empty is none."""
    assert AgentConfig.from_env(environ={"RLBUS_STATE_DIR": ""}).state_dir is None
    assert AgentConfig.from_env(environ={"RLBUS_STATE_DIR": "/s"}).state_dir == "/s"
    with pytest.raises(ConfigError, match="absolute"):
        AgentConfig.from_env(environ={"RLBUS_STATE_DIR": "s"})
