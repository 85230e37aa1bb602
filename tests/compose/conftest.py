"""Fixtures of the tests on containers. Run by `make test-compose`, not by `make test`."""

import secrets
from collections.abc import Generator, Iterator

import pytest

from tests.compose import images
from tests.compose.daemon import docker
from tests.compose.fleet import ENDLESS, Fleet


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """The whole of docker-compose.yml, up; taken down at the end, whatever happened."""
    project = f"rlbustest{secrets.token_hex(4)}"
    with docker() as daemon:
        made = Fleet(daemon, project, images.build(daemon, project))
        request.config.stash[FLEET] = made
        try:
            made.up()
            yield made
        finally:
            made.down()


@pytest.fixture(scope="session")
def training(fleet: Fleet) -> Fleet:
    """With a second trainer, which goes on until it is stopped, on the fleet that the first one has taught."""
    fleet.up("trainer", updates=ENDLESS)
    return fleet


FLEET = pytest.StashKey[Fleet]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what the containers said last."""
    report = yield
    made = item.config.stash.get(FLEET, None)
    if report.failed and made is not None:
        report.sections.extend((f"output of {service}", said) for service, said in made.tails())
    return report
