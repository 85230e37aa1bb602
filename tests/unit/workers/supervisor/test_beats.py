"""Signs of life through a pipe."""

import asyncio
import os

import pytest

from rlbus.workers.supervisor.beats import BEAT_FD, Beats, Hearing

pytestmark = pytest.mark.unit


async def heard(hearing: Hearing, is_true: object) -> None:
    """Until what was written has been read."""
    async with asyncio.timeout(60.0):
        while not is_true():  # type: ignore[operator]  # noqa: ASYNC110 - a pipe has no Event
            await asyncio.sleep(0.01)


def test_beats_say_that_the_loop_turns_that_it_serves_and_whether_its_engine_answers() -> None:
    """Each with the time at which it was heard."""

    async def main() -> None:
        ready: list[str] = []
        hearing = Hearing()
        environ = {BEAT_FD: str(os.dup(hearing.write_fd))}
        beats = Beats.from_env(environ)
        assert beats is not None
        assert environ == {}
        beats.ready()  # before anybody listens
        hearing.listen(lambda: ready.append("ready"))
        answers = True
        beating = asyncio.ensure_future(beats.run(lambda: answers))
        await heard(hearing, lambda: hearing.loop_s is not None)
        assert hearing.engine_s == hearing.loop_s
        answers = False
        before = hearing.loop_s
        await heard(hearing, lambda: hearing.loop_s != before and hearing.engine_s != hearing.loop_s)
        beats.ready()
        await heard(hearing, lambda: ready)
        beating.cancel()
        hearing.close()
        hearing.close()
        assert ready == ["ready"]

    asyncio.run(main())


def test_supervisor_that_does_not_read_or_is_gone_holds_nobody_up() -> None:
    """A full pipe drops beats; a closed one is no error."""

    async def main() -> None:
        read_fd, write_fd = os.pipe()
        beats = Beats(write_fd)
        for _ in range(100_000):
            beats.ready()
        os.close(read_fd)
        beats.ready()
        os.close(write_fd)

    asyncio.run(asyncio.wait_for(main(), 10.0))


@pytest.mark.parametrize("text", ["", "x", "99999", "0"])
def test_without_a_pipe_there_are_no_beats(text: str) -> None:
    """Not set, no number, not open, or something else."""
    with open(os.devnull) as null:
        given = str(null.fileno()) if text == "0" else text
        assert Beats.from_env({BEAT_FD: given}) is None


def test_end_of_the_process_ends_the_hearing() -> None:
    """Its exit is seen elsewhere; the closed pipe must not wake the loop for ever."""

    async def main() -> None:
        hearing = Hearing()
        hearing.listen(lambda: None)
        await asyncio.sleep(0.05)
        assert not asyncio.get_running_loop().remove_reader(hearing.read_fd)
        hearing.close()

    asyncio.run(main())
