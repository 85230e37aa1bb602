"""The controller's HTTP side as a user runs it: real server, real processes, real sockets."""

import functools
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import httpx
import pytest

from tests.integration.commands import LATE, Process, again_until
from tests.tries import TooLateError, best_of

pytestmark = pytest.mark.integration

TOKEN = "a-token"
LIMIT_S = 90.0

P = ParamSpec("P")


def program(*argv: str, **environ: str) -> Process:
    """Start a command with `--json`."""
    return Process(*argv, "--json", **environ)


def played(test: Callable[P, None]) -> Callable[P, None]:
    """Played again if an answer in it was too late; see `told`."""

    @functools.wraps(test)
    def whole(*args: P.args, **kwargs: P.kwargs) -> None:
        best_of(lambda: test(*args, **kwargs))

    return whole


def told(answer: httpx.Response) -> Any:
    """What was answered. Nobody leads for a moment when a controller has stood still, or somebody stood still in an op:
    that is too late.
    """
    given = answer.json()
    details = given.get("rlbus", {})
    codes = {one["code"] for one in (details, *details.get("outcomes", ())) if "code" in one}
    if answer.status_code in (503, 504) or (codes and codes <= LATE):
        raise TooLateError(f"{answer.status_code}: {given}")
    assert answer.status_code == 200, given
    return given


@pytest.fixture(scope="module")
def started() -> Iterator[list[Process]]:
    """Whatever is appended is ended."""
    processes: list[Process] = []
    yield processes
    for process in reversed(processes):
        process.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def up(started: list[Process]) -> dict[str, str]:
    """A server with a controller that serves HTTP, and two fake workers of unequal size."""
    process = program("up", "--http-port", "0", RLBUS_HTTP_TOKEN=TOKEN)
    started.append(process)
    found: dict[str, str] = process.document()
    for number, size in ((1, 1), (18446744073709551615, 2)):
        argv = ("worker", "fake", "--instance-id", str(number), "--world-size", str(size), "--no-restart")
        started.append(program(*argv, RLBUS_URL=found["url"]))
        started[-1].document()
    return found


@pytest.fixture
def client(up: dict[str, str]) -> Iterator[httpx.Client]:
    """With the token."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=up["http_url"], headers=headers, timeout=LIMIT_S, trust_env=False) as client:
        yield client


def are_both_well(rows: list[Any]) -> bool:
    """Whether both workers are listed, and answer."""
    return len(rows) == 2 and all("error" not in row for row in rows)


def rows_once(client: httpx.Client, is_so: Callable[[list[Any]], bool]) -> list[Any]:
    """The list of workers once something is so: the last probes count for a second. Again while nobody leads (503)."""
    until = time.monotonic() + LIMIT_S
    rows: list[Any] = []
    while time.monotonic() < until:
        answer = client.get("/v1/rl/workers")
        rows = [] if answer.status_code == 503 else answer.json()["workers"]
        if is_so(rows):
            return rows
        time.sleep(0.2)
    raise AssertionError(f"not within {LIMIT_S:g} s: {rows}")


@played
def test_a_fleet_is_found_paused_and_resumed(client: httpx.Client) -> None:
    """As an orchestrator does it; ids keep all of their digits."""
    found = rows_once(client, are_both_well)
    if client.get("/health").status_code == 503:
        raise TooLateError("nobody leads at this moment")
    assert [(r["instance_id"], r["world_size"]) for r in found] == [(1, 1), (18446744073709551615, 2)]
    for row in found:
        assert httpx.get(f"{row['system_url']}/live", timeout=LIMIT_S, trust_env=False).status_code == 200
    again_until(lambda: told(client.get("/get_world_size")) == {"world_size": 3})
    assert told(client.post("/pause", params={"mode": "keep"})) == {"status": "paused"}
    assert told(client.get("/is_paused")) == {"is_paused": True}
    assert told(client.post("/resume")) == {"status": "resumed"}
    assert told(client.get("/is_paused")) == {"is_paused": False}


def test_a_worker_that_does_not_answer_has_an_error_before_its_heartbeats_are_missed(
    client: httpx.Client, started: list[Process]
) -> None:
    """SCENARIOS 16: it stays in the list, with nothing to call; and is back when it answers again."""
    worker = started[2].popen

    def play() -> list[Any]:
        """Both, of which the second doesn't answer. Later it is taken for dead, and a busy one is late, too."""
        rows_once(client, are_both_well)
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
    rows_once(client, are_both_well)


@played
def test_a_standby_answers_as_the_leader(up: dict[str, str], started: list[Process]) -> None:
    """Whichever controller an orchestrator was given the address of."""
    standby = program("controller", "--http-port", "0", RLBUS_URL=up["url"])
    started.append(standby)
    found = standby.document()
    if found["role"] != "standby":
        standby.end(signal.SIGTERM)
        raise TooLateError("whoever led stood still, and its lease had ended")
    with httpx.Client(base_url=found["http_url"], timeout=LIMIT_S, trust_env=False) as client:
        rows_once(client, lambda rows: len(rows) == 2)
        assert told(client.post("/pause")) == {"status": "paused"}
        assert told(client.post("/resume")) == {"status": "resumed"}


def test_the_token_is_needed_on_a_real_socket(up: dict[str, str]) -> None:
    """Health apart."""
    with httpx.Client(base_url=up["http_url"], timeout=LIMIT_S, trust_env=False) as client:
        assert client.post("/pause").status_code == client.get("/v1/rl/workers").status_code == 401
        assert client.get("/live").status_code == client.get("/health").status_code == 200


@played
def test_a_client_that_hangs_up_ends_nothing_at_once(up: dict[str, str], client: httpx.Client) -> None:
    """The server goes on, and what it began is through."""
    port = httpx.URL(up["http_url"]).port
    request = f"POST /pause?mode=keep HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port or 0), timeout=LIMIT_S) as raw:
        raw.sendall(request.encode())
    assert told(client.post("/pause", params={"mode": "keep"})) == {"status": "paused"}
    assert told(client.post("/resume")) == {"status": "resumed"}


@pytest.mark.parametrize("command", ["up", "controller"])
def test_nobody_listens_for_others_without_a_token(up: dict[str, str], command: str) -> None:
    """SCENARIOS 43: it ends at once, and says what to set."""
    process = program(command, "--http-host", "0.0.0.0", "--http-port", "0", RLBUS_URL=up["url"])
    code, stderr = process.popen.wait(timeout=LIMIT_S), process.kill()
    assert code == 2
    assert "RLBUS_HTTP_TOKEN" in stderr


def test_a_port_that_is_taken_is_said_at_once(up: dict[str, str]) -> None:
    """Before it leads, or stands by."""
    port = httpx.URL(up["http_url"]).port
    process = program("controller", "--http-port", str(port), RLBUS_URL=up["url"])
    code, stderr = process.popen.wait(timeout=LIMIT_S), process.kill()
    assert code == 2
    assert f"port={port}" in stderr


@played
def test_a_folder_outside_of_any_root_is_refused(up: dict[str, str], tmp_path: Path, client: httpx.Client) -> None:
    """By workers that have no weight root; nothing has changed then."""
    answer = client.post("/update_weights", json={"weight_dir": str(tmp_path)})
    if answer.status_code != 409:
        told(answer)
    assert answer.status_code == 409
    assert "weight root" in answer.json()["error"]["message"]
    assert told(client.get("/weight_info")) == {"weight_version": "default"}
