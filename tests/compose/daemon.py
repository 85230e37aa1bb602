"""A Docker daemon for the tests: the one that answers, or one of their own, which needs root, Debian's packages, and
nothing that was there before. It keeps everything in a temporary folder, is ended by its id, and leaves nothing.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from tests.compose import traces

ROOT = Path(__file__).parents[2]
# A command of Docker takes a tenth of a second; a thousand times that on a loaded machine has been seen.
ASK_S = 120.0
INSTALL_S = 600.0
START_S = 60.0
STOP_S = 60.0
POLL_S = 0.2
TAIL_CHARS = 4000
# Program -> the Debian package that has it.
PACKAGES = {
    "docker": "docker.io",
    "dockerd": "docker.io",
    "docker-compose": "docker-compose",
    "iptables": "iptables",
    "ip": "iproute2",
    "debootstrap": "debootstrap",
}
HOST = "DOCKER_HOST"


class SetupError(Exception):
    """The tests can't run here; says what is missing. Never a reason to skip them."""


class Docker:
    """Commands on one daemon, at a unix socket, with Compose of either kind."""

    def __init__(self, host: str, compose: Sequence[str]) -> None:
        if not host.startswith("unix://"):
            raise SetupError(f"the Docker daemon is at {host}; these tests need one at a unix socket of this machine")
        self._host = host
        self._compose = tuple(compose)
        transport = httpx.HTTPTransport(uds=host.removeprefix("unix://"))
        self._api = httpx.Client(transport=transport, base_url="http://docker", timeout=ASK_S)

    def close(self) -> None:
        """Close the connection to the daemon."""
        self._api.close()

    def post(self, path: str) -> None:
        """One request of Docker's API, which takes milliseconds where the command takes a tenth of a second."""
        self._api.post(path).raise_for_status()

    def run(self, *argv: str, limit_s: float = ASK_S) -> str:
        """`docker ARGV`, its output. Raises: SetupError: it failed."""
        return run(("docker", *argv), limit_s, {HOST: self._host})

    def compose(self, *argv: str, env: Mapping[str, str], limit_s: float) -> str:
        """`docker compose ARGV` in the root of the repository. Raises: SetupError: it failed."""
        return run((*self._compose, *argv), limit_s, {HOST: self._host, **env}, cwd=ROOT)

    def outputs(self, container: str) -> tuple[str, str]:
        """What a container said so far, on stdout and on stderr."""
        done = subprocess.run(
            ("docker", "logs", container),
            env={**os.environ, HOST: self._host},
            capture_output=True,
            text=True,
            timeout=ASK_S,
        )
        return done.stdout, done.stderr


def run(argv: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command to its end; its stdout. Raises: SetupError: it failed, with the end of what it said."""
    try:
        done = subprocess.run(
            argv, env={**os.environ, **(env or {})}, cwd=cwd, capture_output=True, text=True, timeout=limit_s
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise SetupError(f"{' '.join(argv)}: {exc}") from exc
    if done.returncode != 0:
        said = f"{done.stdout}\n{done.stderr}"[-TAIL_CHARS:]
        raise SetupError(f"{' '.join(argv)} ended with {done.returncode}:\n{said}")
    return done.stdout


def install(*programs: str) -> None:
    """Have these programs. Raises: SetupError: they are missing, and can't be installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    packages = sorted({PACKAGES[program] for program in missing})
    how = f"{', '.join(missing)} missing; install {' '.join(packages)}, or run this as root on a machine with apt-get"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(how)
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    run(("apt-get", "update"), INSTALL_S, quiet)
    run(("apt-get", "install", "-y", "--no-install-recommends", *packages), INSTALL_S, quiet)


@contextlib.contextmanager
def docker() -> Iterator[Docker]:
    """Docker, for as long as inside. Raises: SetupError."""
    with contextlib.ExitStack() as stack:
        host = _answering()
        if host is None:
            install("docker", "dockerd", "docker-compose", "iptables", "ip")
            # Where the system starts services, it has started the one that was just installed.
            host = _answering() or stack.enter_context(_daemon())
        found = Docker(host, _compose_command())
        stack.callback(found.close)
        yield found


def _answering() -> str | None:
    """Where a daemon answers."""
    if shutil.which("docker") is None:
        return None
    try:
        host = os.environ.get(HOST) or run(
            ("docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"), ASK_S
        )
        run(("docker", "version", "--format", "{{.Server.Version}}"), ASK_S, {HOST: host.strip()})
    except SetupError:
        if HOST in os.environ:
            raise  # somebody meant this one
        return None
    return host.strip()


def _compose_command() -> tuple[str, ...]:
    try:
        run(("docker", "compose", "version"), ASK_S)
    except SetupError:
        install("docker-compose")
        return ("docker-compose",)
    return ("docker", "compose")


@contextlib.contextmanager
def _daemon() -> Iterator[str]:
    """A daemon of our own; yields where it listens. Raises: SetupError: it can't start, or something of it stays."""
    if os.geteuid() != 0:
        raise SetupError("no Docker daemon answers, and only root can start one; start one, or run this as root")
    if others := _daemons():
        # A second one would empty the firewall's chains of the first.
        raise SetupError(f"dockerd runs as process {others[0]}, but doesn't answer: set {HOST} to where it listens")
    before = traces.look()
    # Directly below /tmp, since the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="rlbus-docker-", dir="/tmp"))
    host = f"unix://{folder}/socket"
    places = ("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid")
    log = folder / "log"
    with log.open("wb") as sink:
        argv = ("dockerd", *places, "--host", host)
        process = subprocess.Popen(argv, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_for(process, host, log)
        yield host
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Before the folder goes, which may take minutes on a loaded machine, and be cut short.
        try:
            left = traces.undo(before)
        finally:
            remove(folder)
        if left:
            raise SetupError("\n".join(("the daemon of these tests has ended, but left:", *left)))


def _daemons() -> list[str]:
    """Process ids of the daemons that share this machine's network: not those within containers."""
    here = Path("/proc/self/ns/net").readlink()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (process / "comm").read_text().strip() == "dockerd" and (process / "ns/net").readlink() == here:
                found.append(process.name)
    return found


def _wait_for(process: "subprocess.Popen[bytes]", host: str, log: Path) -> None:
    until_s = time.monotonic() + START_S
    while True:
        try:
            run(("docker", "version"), ASK_S, {HOST: host})
        except SetupError as exc:
            if process.poll() is not None or time.monotonic() > until_s:
                said = log.read_text(errors="replace")[-TAIL_CHARS:]
                raise SetupError(f"dockerd doesn't come up:\n{said}") from exc
            time.sleep(POLL_S)
        else:
            return


def remove(folder: Path) -> None:
    """A folder that root has made, first unmounting what is still mounted below it. Raises: OSError."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((p for p in mounted if Path(p).is_relative_to(folder)), reverse=True):
        subprocess.run(("umount", "--lazy", place), check=False, capture_output=True, timeout=ASK_S)
    shutil.rmtree(folder)
