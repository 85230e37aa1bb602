"""What is advertised is what the server reports, and what its ranks have shown that they can."""

from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from rlbus.schemas import DRAFT_ROUTE, Fault, FaultCode
from rlbus.workers.engines.native import NATIVE_ROUTES
from rlbus.workers.vllm_grpc import messages
from rlbus.workers.vllm_grpc.capabilities import Greeting, ServerFacts, backends_of, greeting_of, is_ours, routes_of
from rlbus.workers.vllm_server.exchange import RankDraft, RankOutcome

pytestmark = pytest.mark.unit

ALWAYS = {"pause_generation", "resume_generation", "flush_cache", "abort_request", "set_weight_version"}


def facts(**rl: Any) -> ServerFacts:
    """Of a server with one rank, and these capabilities."""
    info = messages.message("ServerInfo", instance_id="1", engine_version="0.32.0")
    info.parallelism.world_size = info.parallelism.data_parallel_size = 1
    info.parallelism.data_parallel_size_local = 1
    for name, value in rl.items():
        setattr(info.rl_capabilities, name, value)
    model = messages.message("ModelInfo", model_id="/models/m", served_model_name="m")
    return ServerFacts.of(info, model)


OURS = {"weight_transfer_enabled": True, "weight_transfer_backend": "rlbus"}


def test_server_without_weight_transfer_has_no_updates() -> None:
    """Pause, resume, flush and abort need none of it."""
    bare = facts()
    assert bare.transfer_backend is None
    problem = is_ours(bare)
    assert problem is not None
    assert "--weight-transfer-config" in problem
    assert routes_of(bare, Greeting(problem=problem), has_expected=True) == ALWAYS
    assert backends_of(bare, Greeting(problem=problem)) == ()


def test_transfer_backend_of_somebody_else_is_not_used() -> None:
    """Its ranks don't understand our messages."""
    problem = is_ours(facts(weight_transfer_enabled=True, weight_transfer_backend="nccl"))
    assert problem is not None
    assert "'nccl'" in problem


def test_backend_that_is_off_counts_as_none() -> None:
    """Whatever its name says."""
    assert facts(weight_transfer_backend="gloo").transfer_backend is None


def test_engines_on_several_machines_have_no_updates() -> None:
    """They couldn't answer in one folder."""
    assert is_ours(facts(**OURS)) is None
    info = messages.message("ServerInfo")
    parallel = info.parallelism
    parallel.world_size, parallel.data_parallel_size, parallel.data_parallel_size_local = 2, 4, 2
    info.rl_capabilities.weight_transfer_enabled = True
    info.rl_capabilities.weight_transfer_backend = "gloo"
    spread = ServerFacts.of(info, messages.message("ModelInfo", model_id="m"))
    assert spread.num_ranks == 8
    problem = is_ours(spread)
    assert problem is not None
    assert "several machines" in problem


def test_draft_is_advertised_where_the_server_updates_it_and_its_tensors_are_known() -> None:
    """What the server says alone doesn't do: it says so of drafts that share tensors with the target, too."""
    draft = RankDraft(method="draft_model", model="/models/d")
    said = RankOutcome(device="cpu", draft=draft)
    assert greeting_of([said, said]).draft == draft
    assert greeting_of([said, RankOutcome(device="cpu")]).draft is None
    able, cpu = facts(**OURS, draft_weight_updates_enabled=True), greeting_of([said])
    assert DRAFT_ROUTE in routes_of(able, cpu, has_expected=True, has_draft=True)
    for routes in (
        routes_of(able, cpu, has_expected=True, has_draft=False),
        routes_of(facts(**OURS), cpu, has_expected=True, has_draft=True),
        routes_of(able, cpu, has_expected=False, has_draft=True),
        routes_of(able, Greeting(problem="no"), has_expected=True, has_draft=True),
    ):
        assert DRAFT_ROUTE not in routes


def test_everything_is_advertised_when_all_is_there() -> None:
    """And NCCL only on GPUs, by the backend that is not called gloo."""
    cuda, cpu = Greeting(("cuda", "cuda")), Greeting(("cpu",))
    assert routes_of(facts(**OURS), cpu, has_expected=True) == ALWAYS | {
        "get_weight_checksums",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        *NATIVE_ROUTES,
    }
    assert backends_of(facts(**OURS), cpu) == ("gloo",)
    assert backends_of(facts(**OURS), cuda) == ("nccl", "gloo")
    assert backends_of(facts(weight_transfer_enabled=True, weight_transfer_backend="gloo"), cuda) == ("gloo",)


def test_without_the_models_tensors_no_update_can_be_checked_so_none_is_served() -> None:
    """Sums need no list."""
    assert routes_of(facts(**OURS), Greeting(("cpu",)), has_expected=False) == ALWAYS | {"get_weight_checksums"}


def test_silent_rank_says_where_this_worker_has_to_run() -> None:
    """The call succeeded, and the answer isn't in our folder: another machine, or another container."""
    greeting = greeting_of([RankOutcome(device="cpu"), None])
    assert greeting.problem is not None
    assert "rank 1" in greeting.problem
    assert "machine" in greeting.problem


def test_rank_of_another_version_says_so() -> None:
    """Its own words are passed on."""
    fault = Fault(code=FaultCode.NO_ROUTE, message="has no answer to 'hello'")
    greeting = greeting_of([RankOutcome(fault=fault)])
    assert greeting.problem == "rank 0: has no answer to 'hello'"


def test_name_of_the_model_and_adapters_are_taken_over() -> None:
    """A server without a name for its model serves it under its path."""
    info = messages.message("ServerInfo", max_loras=4)
    model = messages.message("ModelInfo", model_id="/models/m", supports_lora=True)
    found = ServerFacts.of(info, model)
    assert (found.served_name, found.model) == ("/models/m", "/models/m")
    assert (found.has_lora, found.max_loras, found.num_ranks, found.is_local) == (True, 4, 1, True)


def test_sleep_is_advertised_where_it_frees_memory() -> None:
    """A CPU's engine only says that it sleeps; and a server that reports none has none."""
    slept = {"sleep", "wake_up"}
    cuda, cpu, unknown = Greeting(("cuda",)), Greeting(("cpu",)), Greeting(problem="no plugin")
    able = facts(**OURS, sleep_mode_enabled=True)
    assert slept <= routes_of(able, cuda, has_expected=True)
    assert slept <= routes_of(able, unknown, has_expected=False)
    assert not slept & routes_of(able, cpu, has_expected=True)
    assert not slept & routes_of(facts(**OURS), cuda, has_expected=True)
