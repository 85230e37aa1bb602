"""What `update_weights` is given wrongly is said before anything is sent."""

from typing import Any

import pytest

from rlbus.errors import ConfigError, ManifestError, RefusedError
from rlbus.schemas import TensorSpec, Version
from rlbus.trainer import Trainer, as_version
from tests.unit.rlbus.scripted_controller import SPECS, Controller, Source, play

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("specs", "error", "text"),
    [
        ((), ConfigError, "there is no tensor in it"),
        ((SPECS[0], SPECS[0]), ManifestError, "a"),
    ],
    ids=["empty", "duplicate"],
)
def test_a_source_that_cannot_be_announced_is_refused_before_anything_is_sent(
    specs: tuple[TensorSpec, ...], error: type[Exception], text: str
) -> None:
    """The controller hears nothing of it."""

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        with pytest.raises(error, match=text):
            await trainer.update_weights(Source(specs), version=1)
        assert controller.requests == []

    play(scenario)


def test_more_tensors_than_can_be_reported_are_refused_before_anything_is_sent() -> None:
    """The checksums of all tensors have to fit one message; `too_large` says so now, not after the transfer."""
    specs = tuple(TensorSpec(name=f"layer.{n}.{'x' * 60}", dtype="float32", shape=(1,)) for n in range(12_000))

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        with pytest.raises(RefusedError, match="12000 tensors are too many for one update"):
            await trainer.update_weights(Source(specs), version=1)
        assert controller.requests == []

    play(scenario)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"bucket_bytes": value} for value in (0, 1, 10**12, 2**64, 0.5, True)),
        {"deadline_s": -1.0},
        {"stall_s": 0},
        {"deadline_s": "5"},
        {"stall_s": None},
        {"pause_mode": "x"},
        *({"incarnation": value} for value in (-1, 2**53 + 1, 1.5)),
    ],
)
def test_arguments_that_make_no_sense_are_config_errors(arguments: dict[str, Any]) -> None:
    """Nothing is sent for them."""

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        with pytest.raises(ConfigError):
            await trainer.update_weights(Source(), version=1, **arguments)
        assert controller.requests == []

    play(scenario)


@pytest.mark.parametrize("version", [1.5, "3", None, True, -1, 2**53 + 1, Version(step=2**53 + 1)])
def test_a_version_that_is_no_whole_number_in_bounds_is_a_config_error(version: Any) -> None:
    """It names the version; nothing is sent."""

    async def scenario(trainer: Trainer, controller: Controller) -> None:
        with pytest.raises(ConfigError, match=r"^version"):
            await trainer.update_weights(Source(), version=version)
        assert controller.requests == []

    play(scenario)


@pytest.mark.parametrize("incarnation", [0, 2])
def test_an_incarnation_may_be_said_twice_but_not_in_two_ways(incarnation: int) -> None:
    """None beside a Version is the Version's."""
    assert as_version(Version(incarnation=2, step=7), incarnation) == Version(incarnation=2, step=7)
    with pytest.raises(ConfigError, match=r"incarnation=3: version 2\.7 says another"):
        as_version(Version(incarnation=2, step=7), 3)
