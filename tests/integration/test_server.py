"""The embedded server: a real nats-server that is private, keeps its port, and never outlives its parent."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rlbus import server as server_module
from rlbus._nats import connect_nats
from rlbus._transport import Message
from rlbus.config import BusConfig
from rlbus.errors import BrokenError, ConfigError, DeadlineError
from rlbus.server import EmbeddedServer
from tests.tries import TooLateError, best_of

# Looks for what others of its kind leave behind.
pytestmark = [pytest.mark.integration, pytest.mark.alone]

LIMIT_S = 30.0


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between the opening and the reading
        return False


def command_line(pid: int) -> str:
    """What everybody on the machine can read of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text()


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:  # it was closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


async def ask(url: str, subject: str, body: dict[str, Any]) -> dict[str, Any]:
    """One request to the server's own JetStream API; empty: nobody takes it, as while JetStream starts."""
    transport = await connect_nats(BusConfig(url=url, connect_s=LIMIT_S), name="asker")
    try:
        answers: list[Message] = []
        inbox = transport.new_inbox()
        arrived = asyncio.Event()

        def on_answer(message: Message) -> None:
            answers.append(message)
            arrived.set()

        transport.subscribe(inbox, on_answer)
        transport.publish(subject, json.dumps(body).encode(), inbox)
        await asyncio.wait_for(arrived.wait(), LIMIT_S)
        answer: dict[str, Any] = {} if answers[0].no_responders else json.loads(answers[0].data)
        return answer
    finally:
        await transport.aclose()


async def num_kept(url: str) -> int:
    """How many messages are in the stream S, once the server has it again after its start."""
    async with asyncio.timeout(LIMIT_S):
        while "state" not in (answer := await ask(url, "$JS.API.STREAM.INFO.S", {})):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    num: int = answer["state"]["messages"]
    return num


def leftovers() -> set[str]:
    return {p.name for p in Path(tempfile.gettempdir()).glob("rlbus-nats-*")}


def test_it_is_private_and_leaves_nothing() -> None:
    """SCENARIOS 43: one port, on loopback, behind a generated token in a file of the owner's; all gone at the end."""

    async def scenario() -> None:
        before = leftovers()
        async with EmbeddedServer() as server, EmbeddedServer() as other:
            assert server.token != other.token
            assert server.url == f"nats://{server.token}@127.0.0.1:{server.port}"
            assert len(server.token) >= 32
            assert listening_ports(server.pid) == {server.port}
            folder = server._folder
            assert folder is not None
            assert folder.stat().st_mode & 0o777 == 0o700
            assert (folder / "server.conf").stat().st_mode & 0o777 == 0o600
            assert server.token not in command_line(server.pid)
            pid = server.pid
        assert not is_alive(pid)
        assert not folder.exists()
        assert leftovers() <= before
        await server.aclose()
        with pytest.raises(BrokenError, match="not running"):
            _ = server.pid

    asyncio.run(scenario())


def test_a_given_token_may_hold_any_character() -> None:
    """It is quoted in the URL and in the configuration."""

    async def scenario() -> None:
        for token in ('a/b@c:d "e"#%', "p\u00e4ss\u00e9 \N{SNOWMAN} \\"):
            async with EmbeddedServer(token=token) as server:
                transport = await connect_nats(BusConfig(url=server.url), name="t")
                await transport.barrier(LIMIT_S)
                assert transport.is_connected
                await transport.aclose()

    asyncio.run(scenario())


def test_a_restart_keeps_port_and_store(tmp_path: Path) -> None:
    """So clients find it again, and a file stream is still there; also in the next server on the same folder."""

    async def scenario() -> None:
        store = tmp_path / "store"
        stream = {"name": "S", "subjects": ["kept.*"], "storage": "file"}
        async with EmbeddedServer(store_dir=store) as server:
            assert "error" not in await ask(server.url, "$JS.API.STREAM.CREATE.S", stream)
            assert (await ask(server.url, "kept.1", {}))["seq"] == 1
            url, pid = server.url, server.pid
            await server.restart()
            assert server.url == url
            assert server.pid != pid
            await server.start()
            assert await num_kept(url) == 1
        async with EmbeddedServer(store_dir=store) as server:
            assert await num_kept(server.url) == 1

    asyncio.run(scenario())


def test_its_store_may_take_all_that_its_disk_has_whatever_is_free_when_it_starts(tmp_path: Path) -> None:
    """Its own limit would be three quarters of what is free then, and refuse the lease once that is used. A stream
    reserves more than the whole disk has, which needs no room, and is refused by such a limit.
    """
    disk = os.statvfs(tmp_path)
    stream = {"name": "S", "subjects": ["kept.*"], "storage": "file", "max_bytes": 2 * disk.f_blocks * disk.f_frsize}

    async def scenario() -> None:
        async with EmbeddedServer(store_dir=tmp_path / "store") as server:
            assert "error" not in await ask(server.url, "$JS.API.STREAM.CREATE.S", stream)
            await server.restart()
            assert await num_kept(server.url) == 0

    asyncio.run(scenario())


def test_a_server_that_ends_by_itself_is_started_again_until_it_does_so_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On its port; in the end with the tail of its log."""
    monkeypatch.setattr(server_module, "MAX_RESTARTS", 1)

    async def scenario() -> None:
        async with EmbeddedServer() as server:
            told: list[str] = []
            port, pid = server.port, server.pid
            watching = asyncio.create_task(server.supervise(told.append))
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                while server.pid == pid:  # noqa: ASYNC110 - the real server's start has no event
                    await asyncio.sleep(0.05)
                assert listening_ports(server.pid) == {port}
                os.kill(server.pid, signal.SIGKILL)
                with pytest.raises(
                    BrokenError, match=r"(?s)status -9, after 1 restarts in 60 s; its log ends:.*Server"
                ):
                    await watching
            assert told == [f"nats-server ended with status -9; starting it again on port {port}"]

    asyncio.run(scenario())


def test_a_server_that_cannot_write_to_its_store_is_started_again_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would stay so for ever. A full disk is played: what the server says of it is written into its log. One that
    is only silent, or that logs something else, is left as it is.
    """
    free = [0]
    monkeypatch.setattr(server_module, "free_bytes", lambda _folder: free[0])
    monkeypatch.setattr(server_module, "STORE_POLL_S", 0.05)
    lost = "[7] 2026/11/30 15:48:44.132187 [ERR] JetStream stream '$G > S' critical write error: write 1.blk: no space"

    async def scenario() -> None:
        async with EmbeddedServer(store_dir=tmp_path / "store") as server:
            told: list[str] = []
            port, pid, folder = server.port, server.pid, server._folder
            assert folder is not None
            watching = asyncio.create_task(server.supervise(told.append))

            def say(line: str) -> None:
                with (folder / "server.log").open("a") as log:
                    log.write(f"{line}\n")

            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            say("[7] 2026/11/30 15:48:44.132183 [ERR] JetStream failed to store a msg on stream '$G > S': no space")
            await asyncio.sleep(0.3)
            assert (told, server.pid) == ([], pid)
            say(lost)
            async with asyncio.timeout(LIMIT_S):
                while not told:  # noqa: ASYNC110 - the real server has no event
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.3)
                assert (len(told), server.pid) == (1, pid)
                free[0] = 1 << 30
                while len(told) < 2 or server._child is None or server.pid == pid:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert listening_ports(server.pid) == {port}
                # What it said is said once.
                await asyncio.sleep(0.3)
                assert len(told) == 2
                os.kill(server.pid, signal.SIGKILL)
                while len(told) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            watching.cancel()
            await asyncio.wait({watching})
            store = tmp_path / "store"
            assert told[0] == (
                f"nats-server can't write to its store in {store} any more (write 1.blk: no space), where 0 bytes are "
                f"free; it is started again once there are {server_module.MIN_FREE_BYTES}: make room"
            )
            assert told[1] == f"{1 << 30} bytes are free in {store}; starting nats-server again on port {port}"
            assert told[2].startswith("nats-server ended with status -9")

    asyncio.run(scenario())


def test_a_server_whose_temporary_folder_was_removed_comes_back_if_it_kept_nothing_there(tmp_path: Path) -> None:
    """A cleaner of /tmp takes what is old. The store of its own goes with it, which is said, and never made empty."""

    async def scenario() -> None:
        for kept in (EmbeddedServer(jetstream=False), EmbeddedServer(store_dir=tmp_path)):
            async with kept as server:
                folder, port = server._folder, server.port
                assert folder is not None
                shutil.rmtree(folder)
                await server.restart()
                assert listening_ports(server.pid) == {port}
                new = server._folder
                assert new is not None
                assert new.stat().st_mode & 0o777 == 0o700
            assert not new.exists()
        async with EmbeddedServer() as server:
            assert server._folder is not None
            shutil.rmtree(server._folder)
            with pytest.raises(BrokenError, match="was removed, and what it kept there is lost"):
                await server.restart()

    asyncio.run(scenario())


@pytest.mark.parametrize("own", [True, False])
def test_a_store_that_was_removed_is_never_made_anew(tmp_path: Path, own: bool) -> None:
    """Also where the rest is still there, or the folder was the user's: an empty one knows no term of the fleet's."""

    async def scenario() -> None:
        async with EmbeddedServer(store_dir=None if own else tmp_path / "store") as server:
            assert server._folder is not None
            store = server._folder / "jetstream" if own else tmp_path / "store"
            shutil.rmtree(store)
            with pytest.raises(BrokenError, match="was removed, and what it kept there is lost"):
                await server.restart()
            assert not store.exists()

    asyncio.run(scenario())


def test_a_store_serves_one_server_at_a_time(tmp_path: Path) -> None:
    """The second is refused by name; when the first has ended, the folder is free."""

    async def scenario() -> None:
        async with EmbeddedServer(store_dir=tmp_path):
            before = leftovers()
            with pytest.raises(ConfigError, match="another server uses this folder"):
                await EmbeddedServer(store_dir=tmp_path).__aenter__()
            assert leftovers() == before
        async with EmbeddedServer(store_dir=tmp_path) as server:
            assert is_alive(server.pid)

    asyncio.run(scenario())


def test_a_port_in_use_is_a_wrong_setting() -> None:
    """Not a hang; and nothing is left behind."""

    async def scenario() -> None:
        before = leftovers()
        with (
            socket.create_server(("127.0.0.1", 0)) as taken,
            pytest.raises(ConfigError, match=r"port=.* in use on 127.0.0.1; choose another, or 0"),
        ):
            await EmbeddedServer(port=taken.getsockname()[1]).__aenter__()
        assert leftovers() <= before

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("host", "problem"), [("203.0.113.1", "cannot assign requested address"), ("no such.invalid", "no such host")]
)
def test_an_address_of_another_machine_is_a_wrong_setting(host: str, problem: str) -> None:
    """In one line with the server's reason, and without the rest of its log."""

    async def scenario() -> None:
        with pytest.raises(ConfigError, match=f"host='{host}': can't listen there: {problem}$"):
            await EmbeddedServer(host=host).__aenter__()

    asyncio.run(scenario())


@pytest.mark.parametrize(("host", "reached_at"), [("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1"), ("::", "[::1]")])
def test_a_server_that_listens_everywhere_is_reached_on_loopback_from_here(host: str, reached_at: str) -> None:
    """A wildcard is no address to connect to; others take one of this machine's own."""

    async def scenario() -> None:
        async with EmbeddedServer(host=host) as server:
            assert server.url == f"nats://{server.token}@{reached_at}:{server.port}"
            assert server.url_at("fd00::2") == f"nats://{server.token}@[fd00::2]:{server.port}"
            transport = await connect_nats(BusConfig(url=server.url), name="t")
            await transport.barrier(LIMIT_S)
            await transport.aclose()

    asyncio.run(scenario())


def test_a_binary_that_is_none_is_refused(tmp_path: Path) -> None:
    """Not there, not executable, or one that ends at once."""

    async def scenario() -> None:
        text = tmp_path / "text"
        text.write_text("x")
        for binary in ("/nowhere/nats-server", str(text)):
            with pytest.raises(ConfigError, match="cannot be run"):
                await EmbeddedServer(binary=binary).__aenter__()
        with pytest.raises(BrokenError, match="ended with status 1"):
            await EmbeddedServer(binary="/bin/false").__aenter__()

    asyncio.run(scenario())


def test_a_server_that_never_gets_ready_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it said last; and it is killed."""
    script, pid = tmp_path / "slow", tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho still thinking\necho $$ > {pid}\nexec sleep 600\n")
    script.chmod(0o700)
    # A busy machine may not have come so far within the first of them that the script has said anything.
    limits_s = iter((0.3, 3.0, 30.0))

    def play() -> None:
        pid.write_text("")
        monkeypatch.setattr(server_module, "START_S", next(limits_s))
        with pytest.raises(DeadlineError) as caught:
            asyncio.run(EmbeddedServer(binary=str(script)).__aenter__())
        if not pid.read_text().endswith("\n"):
            raise TooLateError("the script had said nothing yet")
        assert "still thinking" in str(caught.value)
        assert not is_alive(int(pid.read_text()))

    best_of(play, 3)


def test_stopping_a_frozen_server_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM does nothing to it; SIGKILL follows."""
    monkeypatch.setattr(server_module, "STOP_S", 0.3)

    async def scenario() -> None:
        async with EmbeddedServer() as server:
            pid = server.pid
            os.kill(pid, signal.SIGSTOP)
            async with asyncio.timeout(LIMIT_S):
                await server.stop()
            assert not is_alive(pid)

    asyncio.run(scenario())


def test_it_can_be_ended_from_code_that_cannot_await() -> None:
    """Process and folder are gone."""

    async def scenario() -> None:
        server = EmbeddedServer()
        await server.start()
        child, folder = server._child, server._folder
        assert child is not None
        assert folder is not None
        server.kill()
        server.kill()
        assert not folder.exists()
        assert await asyncio.wait_for(child.wait(), LIMIT_S) == -signal.SIGKILL

    asyncio.run(scenario())


def test_it_never_outlives_its_parent() -> None:
    """Even when the parent is killed without warning."""
    code = (
        "import asyncio\n"
        "from rlbus.server import EmbeddedServer\n"
        "async def main():\n"
        "    async with EmbeddedServer() as s:\n"
        "        print(s.pid, s._folder, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        with parent.stdout:
            pid, folder = parent.stdout.readline().split()
        assert is_alive(int(pid))
    finally:
        parent.kill()
        parent.wait(LIMIT_S)

    async def gone() -> None:
        async with asyncio.timeout(LIMIT_S):
            while is_alive(int(pid)):  # noqa: ASYNC110 - another process ends
                await asyncio.sleep(0.001)

    asyncio.run(gone())
    shutil.rmtree(folder)
