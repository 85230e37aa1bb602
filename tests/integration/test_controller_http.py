"""The controller's HTTP side as a user runs it: real server, real processes, real sockets."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tries import TooLateError, best_of

pytestmark = pytest.mark.integration

TOKEN = "a-token"
LIMIT_S = 90.0


class Process:
    """A long-running command with `--json`; `document` is its first line."""

    def __init__(self, *argv: str, **env: str) -> None:
        base = {name: text for name, text in os.environ.items() if not name.startswith("RLBUS_")}
        command = [sys.executable, "-m", "rlbus", *argv, "--json"]
        self.popen = subprocess.Popen(
            command, env=base | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def document(self) -> Any:
        """Waits for it."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.popen.communicate()[1]
        return json.loads(line)

    def end(self) -> tuple[int, str]:
        """Stop it; exit code and stderr."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        _, stderr = self.popen.communicate(timeout=LIMIT_S)
        return self.popen.returncode, stderr


@pytest.fixture(scope="module")
def started() -> Iterator[list[Process]]:
    """Whatever is appended is ended."""
    processes: list[Process] = []
    yield processes
    for process in reversed(processes):
        process.end()


@pytest.fixture(scope="module")
def up(started: list[Process]) -> dict[str, str]:
    """A server with a controller that serves HTTP, and two fake workers of unequal size."""
    process = Process("up", "--http-port", "0", RLBUS_HTTP_TOKEN=TOKEN)
    started.append(process)
    found: dict[str, str] = process.document()
    for number, size in ((1, 1), (18446744073709551615, 2)):
        argv = ("worker", "fake", "--instance-id", str(number), "--world-size", str(size), "--no-restart")
        started.append(Process(*argv, RLBUS_URL=found["url"]))
        started[-1].document()
    return found


@pytest.fixture
def client(up: dict[str, str]) -> Iterator[httpx.Client]:
    """With the token."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=up["http_url"], headers=headers, timeout=LIMIT_S, trust_env=False) as client:
        yield client


def rows_once(client: httpx.Client, is_so: Callable[[list[Any]], bool]) -> list[Any]:
    """The list of workers once something is so: the last probes count for a second."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        rows: list[Any] = client.get("/v1/rl/workers").json()["workers"]
        if is_so(rows):
            return rows
        time.sleep(0.2)
    raise AssertionError(f"not within {LIMIT_S:g} s: {rows}")


def test_a_fleet_is_found_paused_and_resumed(client: httpx.Client) -> None:
    """As an orchestrator does it; ids keep all of their digits."""
    assert client.get("/health").status_code == 200
    found = rows_once(client, lambda rows: all("error" not in row for row in rows))
    assert [(r["instance_id"], r["world_size"]) for r in found] == [(1, 1), (18446744073709551615, 2)]
    for row in found:
        assert httpx.get(f"{row['system_url']}/live", timeout=LIMIT_S, trust_env=False).status_code == 200
    assert client.get("/get_world_size").json() == {"world_size": 3}
    assert client.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.post("/resume").json() == {"status": "resumed"}
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_a_worker_that_does_not_answer_has_an_error_before_its_heartbeats_are_missed(
    client: httpx.Client, started: list[Process]
) -> None:
    """SCENARIOS 16: it stays in the list, with nothing to call; and is back when it answers again."""
    worker = started[2].popen

    def play() -> list[Any]:
        """Both, of which the second doesn't answer. Later it is taken for dead, and a busy one is late, too."""
        rows_once(client, lambda rows: len(rows) == 2 and all("error" not in row for row in rows))
        worker.send_signal(signal.SIGSTOP)
        try:
            return rows_once(client, lambda rows: len(rows) < 2 or ["error" in row for row in rows] == [False, True])
        finally:
            worker.send_signal(signal.SIGCONT)

    def both() -> list[Any]:
        rows = play()
        if len(rows) < 2 or "doesn't answer within 2 s" not in rows[1]["error"]:
            raise TooLateError(f"its heartbeats were missed by then: {rows}")
        return rows

    _, two = best_of(both)
    assert (two["routes"], "system_url" in two, two["instance_id"]) == ([], False, 18446744073709551615)
    rows_once(client, lambda rows: len(rows) == 2 and all("error" not in row for row in rows))


def test_a_standby_answers_as_the_leader(up: dict[str, str], started: list[Process]) -> None:
    """Whichever controller an orchestrator was given the address of."""
    standby = Process("controller", "--http-port", "0", RLBUS_URL=up["url"])
    started.append(standby)
    found = standby.document()
    assert found["role"] == "standby"
    with httpx.Client(base_url=found["http_url"], timeout=LIMIT_S, trust_env=False) as client:
        assert len(client.get("/v1/rl/workers").json()["workers"]) == 2
        assert client.post("/pause").json() == {"status": "paused"}
        assert client.post("/resume").json() == {"status": "resumed"}


def test_the_token_is_needed_on_a_real_socket(up: dict[str, str]) -> None:
    """Health apart."""
    with httpx.Client(base_url=up["http_url"], timeout=LIMIT_S, trust_env=False) as client:
        assert client.post("/pause").status_code == client.get("/v1/rl/workers").status_code == 401
        assert client.get("/live").status_code == client.get("/health").status_code == 200


def test_a_client_that_hangs_up_ends_nothing_at_once(up: dict[str, str], client: httpx.Client) -> None:
    """The server goes on, and what it began is through."""
    port = httpx.URL(up["http_url"]).port
    request = f"POST /pause?mode=keep HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port or 0), timeout=LIMIT_S) as raw:
        raw.sendall(request.encode())
    assert client.post("/pause", params={"mode": "keep"}).status_code == 200
    assert client.post("/resume").json() == {"status": "resumed"}


@pytest.mark.parametrize("command", ["up", "controller"])
def test_nobody_listens_for_others_without_a_token(up: dict[str, str], command: str) -> None:
    """SCENARIOS 43: it ends at once, and says what to set."""
    process = Process(command, "--http-host", "0.0.0.0", "--http-port", "0", RLBUS_URL=up["url"])
    code, stderr = process.popen.wait(timeout=LIMIT_S), process.end()[1]
    assert code == 2
    assert "RLBUS_HTTP_TOKEN" in stderr


def test_a_port_that_is_taken_is_said_at_once(up: dict[str, str]) -> None:
    """Before it leads, or stands by."""
    port = httpx.URL(up["http_url"]).port
    process = Process("controller", "--http-port", str(port), RLBUS_URL=up["url"])
    code, stderr = process.popen.wait(timeout=LIMIT_S), process.end()[1]
    assert code == 2
    assert f"port={port}" in stderr


def test_a_folder_outside_of_any_root_is_refused(up: dict[str, str], tmp_path: Path, client: httpx.Client) -> None:
    """By workers that have no weight root; nothing has changed then."""
    answer = client.post("/update_weights", json={"weight_dir": str(tmp_path)})
    assert answer.status_code == 409
    assert "weight root" in answer.json()["error"]["message"]
    assert client.get("/weight_info").json() == {"weight_version": "default"}
