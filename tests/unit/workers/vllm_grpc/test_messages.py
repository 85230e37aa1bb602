"""The messages' bytes are those of vLLM's own definition, and what isn't known is skipped."""

import pytest

pytest.importorskip("google.protobuf")

from rlbus.workers.vllm_grpc import messages

pytestmark = pytest.mark.unit


def test_bytes_are_those_that_vllm_rs_sent() -> None:
    """Recorded from vllm-rs 0.32; fields that are not used here are skipped."""
    data = (
        b"\n\x060.32.0\x12\x04vllm\x1a\x131795984853179346441"
        b'"\x0c\x08\x01\x10\x01\x18\x01(\x010\x018\x01(\x80\x040\x80\x018\x80@@\x80\x01H\x80\x10Z\x08\x08\x01\x12\x04gloop\x80\x01'
    )
    info = messages.parse("ServerInfo", data)
    assert (info.engine_version, info.instance_id) == ("0.32.0", "1795984853179346441")
    assert (info.parallelism.world_size, info.parallelism.data_parallel_size_local) == (1, 1)
    assert info.rl_capabilities.weight_transfer_backend == "gloo"
    assert not info.rl_capabilities.sleep_mode_enabled


def test_optional_false_is_not_the_same_as_nothing() -> None:
    """The server takes an absent clear_cache for true."""
    assert messages.message("PauseGenerationRequest", mode=3).SerializeToString() == b"\x08\x03"
    assert messages.message("PauseGenerationRequest", mode=3, clear_cache=False).SerializeToString() == (
        b"\x08\x03\x10\x00"
    )


def test_repeated_and_bytes_fields() -> None:
    """As protobuf writes them."""
    assert messages.message("AbortRequest", request_ids=["a", "b"]).SerializeToString() == b"\x0a\x01a\x0a\x01b"
    assert messages.message("UpdateWeightsRequest", update_info_json=b"{}").SerializeToString() == b"\x0a\x02{}"


def test_wrong_names_are_found_where_they_are_written() -> None:
    """Not on the wire, where an unknown field would be dropped."""
    with pytest.raises(ValueError, match="nonsense"):
        messages.message("AbortRequest", nonsense=1)
    with pytest.raises(KeyError):
        messages.message("NoSuchMessage")


def test_every_method_has_its_messages() -> None:
    """And the path by which gRPC addresses it."""
    for method in messages.METHODS:
        messages.message(method.request)
        messages.parse(method.response, b"")
        assert method.path == f"/vllm.Control/{method.name}"
