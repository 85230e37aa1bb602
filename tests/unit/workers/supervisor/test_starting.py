"""A process that can't be started: what the supervisor makes of it. No process is started here."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlbus._process import Child
from rlbus.errors import ConfigError
from rlbus.workers.supervisor.restarts import RestartPolicy, Restarts
from rlbus.workers.supervisor.supervise import EXIT_GAVE_UP, Supervision, WorkerCommand, keep_running
from rlbus.workers.vllm_http.supervisor import Pair, run_pair

pytestmark = pytest.mark.unit

PROGRAM = "/opt/server"
COMMAND = WorkerCommand((PROGRAM, "serve"), {}, beats=False)
# As often as it is started in all: the first time, and the restarts.
MAX_RESTARTS = 2
POLICY = RestartPolicy(max_restarts=MAX_RESTARTS, first_s=0.0, max_s=0.0)
LIMIT_S = 60.0


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Has starts of programs fail so, one after the other, the last for ever; the programs that were started."""
    asked: list[str] = []

    def patch(*errors: int) -> list[str]:
        left = list(errors)

        async def start(name: str, argv: tuple[str, ...], **options: object) -> Child:
            asked.append(argv[0])
            number = left.pop(0) if len(left) > 1 else left[0]
            raise OSError(number, os.strerror(number), argv[0])

        monkeypatch.setattr(Child, "start", start)
        return asked

    return patch


async def kept(tmp_path: Path) -> int:
    """How the supervisor ends."""
    how = Supervision(who="backend/7", log=tmp_path / "log")
    async with asyncio.timeout(LIMIT_S):
        return await keep_running(COMMAND, how, Restarts(POLICY), asyncio.Event())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ETXTBSY])
def test_start_that_fails_is_tried_again_as_after_an_end(
    number: int, tmp_path: Path, starts: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """The machine is short of something for a while; it is given up as a process that ends again and again."""
    asked = starts(number)
    assert asyncio.run(kept(tmp_path)) == EXIT_GAVE_UP
    assert asked == [PROGRAM] * (1 + MAX_RESTARTS)
    assert os.strerror(number) in caplog.text


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOTDIR])
def test_program_that_never_was_there_is_told_at_once(
    number: int, tmp_path: Path, starts: Callable[..., list[str]]
) -> None:
    """A typing error; trying again changes nothing."""
    asked = starts(number)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(kept(tmp_path))
    assert caught.value.value == PROGRAM
    assert asked == [PROGRAM]


def test_pair_of_which_one_can_not_be_started_ends_as_a_whole(tmp_path: Path, starts: Callable[..., list[str]]) -> None:
    """With the code of whoever gave up."""
    starts(errno.ENOMEM)

    async def main() -> int:
        how = Supervision(who="backend/7", log=tmp_path / "log")
        async with asyncio.timeout(LIMIT_S):
            return await run_pair(Pair(server=COMMAND, agent=COMMAND), how, POLICY, asyncio.Event())

    assert asyncio.run(main()) == EXIT_GAVE_UP
