"""Fixtures of the tests on containers. Run by `make test-compose`, not by `make test`."""

import secrets
from collections.abc import Generator, Iterator, Mapping

import pytest

from tests.compose.daemon import Docker, docker
from tests.compose.fleet import ENDLESS, HEALTHY_S, SERVICES, TRAIN_S, Fleet, until
from tests.compose.images import build


@pytest.fixture(scope="session")
def daemon() -> Iterator[Docker]:
    """Docker, on this machine."""
    with docker() as found:
        yield found


@pytest.fixture(scope="session")
def images(daemon: Docker) -> Mapping[str, str]:
    """Both images, built; the variables that docker-compose.yml needs to use them."""
    return build(daemon, _new_name())


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, daemon: Docker, images: Mapping[str, str]) -> Iterator[Fleet]:
    """The whole of docker-compose.yml, up; taken down at the end, whatever happened, and then nothing of it is left."""
    made = Fleet(daemon, _new_name(), images)
    request.config.stash[FLEET] = made
    try:
        made.up()
        yield made
    finally:
        made.down()
        assert made.leftovers() == []


@pytest.fixture(scope="session")
def taught(fleet: Fleet) -> Fleet:
    """With everybody healthy, and a trainer that has ended."""
    for service in SERVICES:
        until(lambda name=service: fleet.is_healthy(name), HEALTHY_S, f"{service} is healthy")  # type: ignore[misc]
    until(lambda: fleet.state("trainer")["Status"] == "exited", TRAIN_S, "the trainer ends")
    return fleet


@pytest.fixture(scope="session")
def training(taught: Fleet) -> Fleet:
    """With a second trainer, which goes on until it is stopped, on the fleet that the first one has taught."""
    taught.up("trainer", updates=ENDLESS)
    return taught


@pytest.fixture
def other_fleet(daemon: Docker, images: Mapping[str, str]) -> Iterator[Fleet]:
    """A project beside the fleet, not up; taken down at the end."""
    made = Fleet(daemon, _new_name(), images)
    yield made
    made.down()


def _new_name() -> str:
    return f"rlbustest{secrets.token_hex(4)}"


FLEET = pytest.StashKey[Fleet]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what the containers said last."""
    report = yield
    made = item.config.stash.get(FLEET, None)
    if report.failed and made is not None:
        report.sections.extend((f"output of {service}", said) for service, said in made.tails())
    return report
