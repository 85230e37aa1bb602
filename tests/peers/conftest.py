"""Fixtures of the tests against real programs of others. Run by `make test-peers`, not by `make test`."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from rlbus.workers.torch_lm.make import make_tiny_model
from tests.peers.programs import CONNECT_S, Programs


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    """Who connects from this process has time for it, too: trainers, and vLLM's client on the bus."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLBUS_CONNECT_S", str(CONNECT_S))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 that vLLM and torch load alike."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", vocab_size=512)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Programs]:
    """Starts what a module's tests share; ended after the last of them."""
    started = Programs(tmp_path_factory.mktemp("logs"))
    request.module.rlbus_programs = started
    try:
        yield started
    finally:
        started.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what the programs said last, and where the rest is."""
    report = yield
    started = getattr(getattr(item, "module", None), "rlbus_programs", None)
    if report.failed and isinstance(started, Programs):
        for program in started.running:
            report.sections.append((f"output of {program.name}", program.tail()))
    return report
